"""The forms of a prompt: each reduced to what was meant, everything else refused by name."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from surefoot import LLM, SamplingParams
from surefoot.errors import ConfigurationError, RequestError, SurefootError
from surefoot.prompts import as_messages, as_prompt, as_prompts, checked_text, conversation_tokens
from surefoot.targets.target import Target
from tests.tiny_models import tiny_target
from tests.tiny_tokenizers import byte_level_tokenizer

IDS = [1, 2, 3]


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        (1, 2, 3),
        range(1, 4),
        np.array(IDS),
        np.array(IDS, dtype=np.int32),
        np.array(IDS, dtype=np.uint16),
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        [np.int64(1), np.uint8(2), 3],
        list(torch.tensor(IDS)),  # tensors without dimensions are numbers
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.array(IDS)},
        {"prompt": IDS},
        {"input_ids": IDS, "attention_mask": [1, 1, 1]},
        {"input_ids": torch.tensor([IDS])},
        BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]}),
    ],
    ids=repr,
)
def test_token_ids_in_every_form(prompt: Any) -> None:
    assert as_prompt(prompt) == IDS
    assert as_prompts(prompt) == [IDS]
    assert as_prompts([prompt]) == [IDS]
    assert as_prompts([prompt, "text", prompt]) == [IDS, "text", IDS]
    assert {type(token) for token in as_prompt(prompt)} == {int}


def test_texts_in_every_form() -> None:
    for prompt in ("text", {"prompt": "text"}):
        assert as_prompt(prompt) == "text"
        assert as_prompts(prompt) == ["text"]
    assert as_prompts(["a", {"prompt": "b"}]) == ["a", "b"]
    assert as_prompts(("a", "b")) == ["a", "b"]
    assert as_prompts(text for text in ("a", "b")) == ["a", "b"]


def test_several_prompts_of_token_ids() -> None:
    rows = [[1, 2], [3]]
    assert as_prompts(rows) == rows
    assert as_prompts([np.array(row) for row in rows]) == rows
    assert as_prompts(list(torch.tensor([[1], [3]]))) == [[1], [3]]  # one token each, not one prompt of two
    assert as_prompts([{"prompt_token_ids": row} for row in rows]) == rows
    assert as_prompts([]) == []
    assert as_prompts([[]]) == [[]]  # which the engine refuses: it has no tokens


def test_what_a_tokenizer_returns_for_one_text_and_for_several() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    one, other = tokenizer("ab c")["input_ids"], tokenizer("a stop is a stop")["input_ids"]
    assert len(one) != len(other)
    assert as_prompts(tokenizer("ab c")) == [one]
    assert as_prompts(tokenizer(["ab c", "a stop is a stop"])) == [one, other]
    for side in ("left", "right"):  # padding is not part of a prompt
        tokenizer.padding_side = side
        for kind in ("pt", "np", None):
            padded = tokenizer(["ab c", "a stop is a stop"], padding=True, return_tensors=kind)
            assert as_prompts(padded) == [one, other], (side, kind)
    assert as_prompt(tokenizer("ab c", return_tensors="pt")) == one
    with pytest.raises(TypeError, match="holds 2 tokenized texts where one is allowed"):
        as_prompt(tokenizer(["ab c", "a stop"]))


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        (None, "prompt is None"),
        (3, "prompt is 3"),
        (1.5, "prompt is 1.5"),
        (b"abc", "prompt is bytes b'abc'"),
        (bytearray(b"abc"), "prompt is bytearray"),
        ({1, 2}, "prompt is set"),
        ({}, "with the keys (none)"),
        ({"text": "a"}, "a dict with the keys 'text'"),
        ({"prompt": "a", "multi_modal_data": {}}, "'prompt', 'multi_modal_data'"),
        ({"prompt": {"prompt": "a"}}, "'prompt' is a dict with the keys 'prompt'"),
        ({"prompt_token_ids": "abc"}, "prompt is str 'abc'"),
        ({"prompt_token_ids": [[1, 2]]}, "item 0 of a list of token ids is list"),
        ({"input_ids": IDS, "pixel_values": []}, "'input_ids', 'pixel_values'"),
        ({"input_ids": [IDS], "pixel_values": []}, "'pixel_values' beside 'input_ids'"),
        ({"input_ids": IDS, "attention_mask": [1]}, "attention_mask has 1 entries for 3 input_ids"),
        ([1, "a"], "item 1 of a list of token ids is str 'a'"),
        ([1, 2.0], "item 1 of a list of token ids is 2.0"),
        ([1, True], "item 1 of a list of token ids is True"),
        ([1, None], "item 1 of a list of token ids is None"),
        ([1, np.float32(2)], "item 1 of a list of token ids is a float32"),
        ([1, np.bool_(True)], "item 1 of a list of token ids is a bool"),
        ([True, 1], "prompt is True"),
        (["a", 1], "prompt is 1"),
        (["a", ["b"]], "item 0 of a list of token ids is str 'b'"),
        ([["a"]], "item 0 of a list of token ids is str 'a'"),
        (np.array([1.0, 2.0]), "item 0 of a list of token ids is 1.0"),
        (np.array([[1, 2]]), r"a ndarray of shape (1, 2) and dtype int64"),
        (torch.ones(2, 2, dtype=torch.long), "a Tensor of shape (2, 2) and dtype torch.int64"),
        (torch.tensor([True, False]), "item 0 of a list of token ids is True"),
        (np.array(["a", "b"]), "item 0 of a list of token ids is str 'a'"),
        pytest.param(object(), "prompt is object", id="object"),
    ],
    ids=repr,
)
def test_everything_else_is_a_type_error_that_names_the_forms(prompts: Any, words: str) -> None:
    with pytest.raises(TypeError) as raised:
        as_prompts(prompts)
    assert isinstance(raised.value, RequestError)  # so the command line and servers know it, too
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    if "attention_mask" not in words:
        assert "{'prompt_token_ids': ids}" in str(raised.value)


plain = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.binary(max_size=3))
keys = st.sampled_from(["prompt", "prompt_token_ids", "input_ids", "attention_mask", "x"]) | st.integers(0, 3)
anything = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner),
    max_leaves=6,
)


@given(anything)
def test_anything_at_all_is_understood_or_refused(value: Any) -> None:
    try:
        prompts = as_prompts(value)
    except SurefootError:
        pass
    else:
        for prompt in prompts:
            assert isinstance(prompt, str) or all(type(token) is int for token in prompt)
    with contextlib.suppress(SurefootError):
        assert all(isinstance(message["role"], str) for message in as_messages(value))


def test_bytes_that_are_no_text_are_a_request_error() -> None:
    assert checked_text("né \N{PILE OF POO}") == "né \N{PILE OF POO}"
    for prompts in ("ok\udcff", ["ok\udcff"], {"prompt": "ok\udcff"}):
        with pytest.raises(RequestError, match="character 2 stands for a byte that is not UTF-8"):
            as_prompts(prompts)


# --- messages ---------------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}(no thinking)\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer_with(template: str | None) -> Any:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rendered(messages: Any, template: str = TEMPLATE, **variables: Any) -> str:
    tokenizer = tokenizer_with(template)
    return str(tokenizer.decode(conversation_tokens(tokenizer, "tiny", messages, variables or None)))


def test_text_parts_are_joined_and_nothing_else_is_rendered() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    assert rendered([{"role": "user", "content": parts}]) == "user: Hi there\nassistant:"
    assert rendered(({"role": "user", "content": "Hi"},)) == "user: Hi\nassistant:"
    with pytest.raises(RequestError, match="message 0 has a part of the type 'image_url'"):
        rendered([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", "messages is str 'Hi'"),
        (HI[0], "messages is a dict with the keys 'role', 'content'"),
        (deque(["Hi"]), "message 0 is str 'Hi'"),
        ([{"content": "Hi"}], "message 0 is a dict with the keys 'content'"),
        ([*HI, {"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": 3}], "content of message 0 is 3"),
        ([{"role": "user", "content": b"Hi"}], "content of message 0 is bytes b'Hi'"),
        ([HI], "message 0 is list"),
        (None, "messages is None"),
    ],
    ids=repr,
)
def test_other_conversations_are_a_type_error(messages: Any, words: str) -> None:
    with pytest.raises(TypeError, match="allowed") as raised:
        rendered(messages)
    assert words in str(raised.value)


def test_an_empty_conversation_and_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(RequestError, match="conversation is empty"):
        rendered([])
    with pytest.raises(RequestError, match="not UTF-8"):
        rendered([{"role": "user", "content": "\udcff"}])


def test_template_arguments_reach_the_template_and_misspelt_ones_are_refused() -> None:
    assert rendered(HI, enable_thinking=False) == "user: Hi\n(no thinking)\nassistant:"
    assert rendered(HI, enable_thinking=True) == "user: Hi\nassistant:"
    assert rendered(HI, add_generation_prompt=False) == "user: Hi\n"
    with pytest.raises(RequestError, match=r"'enable_thnking'.*does not read.*enable_thinking"):
        rendered(HI, enable_thnking=False)
    with pytest.raises(RequestError, match="'tokenize', which surefoot sets itself"):
        rendered(HI, tokenize=False)
    with pytest.raises(TypeError, match="chat_template_kwargs is list"):
        conversation_tokens(tokenizer_with(TEMPLATE), "tiny", HI, ["enable_thinking"])  # type: ignore[arg-type]


def test_what_the_template_refuses_is_one_line() -> None:
    with pytest.raises(RequestError, match="template of tiny refuses this conversation: roles must alternate"):
        rendered(HI, template="{{ raise_exception('roles must\nalternate') }}")


def test_without_tokenizer_or_template_the_message_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match="tiny has no tokenizer"):
        conversation_tokens(None, "tiny", HI)
    with pytest.raises(RequestError, match="`surefoot generate` without --chat"):
        conversation_tokens(tokenizer_with(None), "tiny", HI)


# --- through the engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    tokenizer = tokenizer_with(TEMPLATE)
    model = tiny_target("llama", vocab_size=len(tokenizer)).model
    return LLM(Target(model, tokenizer, name="tiny"), drafter="none", cost_table="none", max_model_len=64, seed=1)


def test_every_form_is_completed_alike_and_names_of_keys_are_not(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)

    def completed(prompts: Any) -> list[tuple[list[int], list[int]]]:
        return [(o.prompt_token_ids, o.token_ids) for o in llm.generate(prompts, params, progress=False)]

    ids = llm.tokenizer("ab c")["input_ids"]
    expected = completed("ab c")
    assert expected[0][0] == ids
    for form in (ids, llm.tokenizer("ab c"), {"prompt": "ab c"}, {"prompt_token_ids": ids}, torch.tensor(ids)):
        assert completed(form) == expected
        assert llm.stream(form, params).result.prompt_token_ids == ids
    with pytest.raises(TypeError, match="token ids"):
        llm.generate({"text": "ab c"}, params)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="token ids"):
        llm.stream({"text": "ab c"}, params)


def test_chat_takes_template_arguments(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    for output in (
        llm.chat(HI, params, chat_template_kwargs={"enable_thinking": False}),
        llm.stream_chat(HI, params, chat_template_kwargs={"enable_thinking": False}).result,
    ):
        assert llm.tokenizer.decode(output.prompt_token_ids) == "user: Hi\n(no thinking)\nassistant:"
