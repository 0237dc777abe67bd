"""Structured output: every answer has its form, speculation on or off, and the law is the target's under the form."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import jsonschema
import pytest
import torch

from surefoot import LLM
from surefoot.engine import distribution, masks
from surefoot.engine.grammar import Grammars
from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams
from surefoot.structured import StructuredOutput
from surefoot.targets.target import Target
from tests.engine.engines import QueueDevice, build
from tests.engine.test_masks import LEVEL, law_under, p_value
from tests.engine.test_masks import PROMPT as LAW_PROMPT
from tests.serving.server import tiny, tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=120)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny()


def texts(
    target: Any, drafter: str, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> list[Any]:
    engine = build(target, drafter, gamma=4, width=None if drafter == "none" else 3, max_model_len=256, **options)
    requests = engine.run(prompts, params)
    engine.assert_clean()
    return [request.output for request in requests]


def schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema whose values are short: random models ramble."""
    kinds = ["boolean", "enum", "integer", "null", "string", "const", "anyOf"]
    kind = random.choice([*kinds, "object", "object", "array"] if depth < 3 else kinds)
    if kind == "enum":
        return {"enum": random.sample(["a", "stop", 3, None, True, "é"], random.randint(1, 3))}
    if kind == "const":
        return {"const": random.choice(["x", 7])}
    if kind == "integer":
        low = random.randint(-9, 5)
        return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 90)}
    if kind == "string":
        return {"type": "string", "maxLength": random.randint(1, 4)}
    if kind == "anyOf":
        return {"anyOf": [schema(random, 3), schema(random, 3)]}
    if kind == "array":
        low = random.randint(0, 1)
        return {"type": "array", "items": schema(random, depth + 1), "minItems": low, "maxItems": low + 1}
    if kind == "object":
        names = random.sample(["a", "b", "stop", "name"], random.randint(1, 3))
        required = [name for name in names if random.random() < 0.7]
        properties = {name: schema(random, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def top(random: Random) -> dict[str, Any]:
    properties = {"v": schema(random), "w": {"$ref": "#/$defs/small"}}
    small = schema(random, 3)
    return {"type": "object", "properties": properties, "required": ["v", "w"], "$defs": {"small": small}}


@pytest.mark.parametrize("drafter", ["prompt-lookup", "dspark"])
def test_a_hundred_schemas_are_kept_and_greedy_answers_are_those_without_drafts(target: Target, drafter: str) -> None:
    half = 50 if drafter == "dspark" else 0  # each drafter has its fifty
    schemas = [top(Random(seed)) for seed in range(half, half + 50)]
    prompts = [tokenizer()(f"say {index}: a stop is {{")["input_ids"] for index in range(50)]
    params = [replace(GREEDY, structured=StructuredOutput(json_schema=each)) for each in schemas]
    drafted = texts(target, drafter, prompts, params)
    plain = texts(target, "none", prompts, params)
    ended = 0
    for output, other, wanted in zip(drafted, plain, schemas, strict=True):
        assert output.token_ids == other.token_ids
        if output.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(output.text), wanted)
        else:
            assert output.finish_reason == "length", output.error
    assert ended >= 40, "most answers were cut off: nothing was validated"


@pytest.mark.parametrize("device", [lambda: None, lambda: QueueDevice(late=True)])
@pytest.mark.parametrize("drafter", ["none", "prompt-lookup", "combined-dspark", "dspark-reduced"])
def test_forms_hold_at_temperature_1_beside_free_requests(target: Target, drafter: str, device: Any) -> None:
    warm = SamplingParams(temperature=1.0, max_tokens=60, logit_bias={5: 2.0}, repetition_penalty=1.1)
    forms = [
        StructuredOutput(regex=r"[ab]{3,9}-[0-9]+(é|€)?"),
        StructuredOutput(choice=["stop", "a stop", "été"]),
        StructuredOutput(grammar='root ::= "(" root ")" | "x"'),
        StructuredOutput(json_object=True),
        None,
    ]
    params = [replace(warm, structured=form, seed=index) for index, form in enumerate(forms * 4)]
    prompts = [tokenizer()(f"{index} aba-12 stop")["input_ids"] for index in range(len(params))]
    outputs = texts(target, drafter, prompts, params, device=device(), max_num_seqs=4, num_blocks=80)
    ended: Counter[int] = Counter()
    for index, output in enumerate(outputs):
        assert output.error is None
        if output.finish_reason != "stop" or index % 5 == 4:
            continue
        ended[index % 5] += 1
        text = output.text
        if index % 5 == 0:
            assert re.fullmatch(r"[ab]{3,9}-[0-9]+(é|€)?", text)
        elif index % 5 == 1:
            assert text in ("stop", "a stop", "été")
        elif index % 5 == 2:
            assert text.strip("()") == "x"
            assert text.count("(") == text.count(")")
        else:
            assert isinstance(json.loads(text), dict)
    assert all(ended[kind] >= 1 for kind in range(3)), ended
    if drafter in ("prompt-lookup", "combined-dspark"):
        assert ended[1] == 4


def law_engine(drafter: str) -> Any:
    from tests.tiny_models import tiny_target

    target = tiny_target("llama", vocab_size=6, sharpness=4.0)
    return build(
        target,
        drafter,
        gamma=2,
        width=None if drafter == "none" else 2,
        max_num_seqs=512,
        max_model_len=24,
        check_layout=False,
    )


class Letters:
    """A regular expression over letters a … f for the six tokens, by xgrammar itself; token 5 ends the answer."""

    def __init__(self, regex: str) -> None:
        import xgrammar

        vocabulary = ["a", "b", "c", "d", "e", "</s>"]
        info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[5])
        self.compiled = xgrammar.GrammarCompiler(info).compile_regex(regex)

    def mask(self, target: Any) -> Any:
        from surefoot.engine.grammar import GrammarMask

        return GrammarMask(self.compiled, StructuredOutput(regex="x"), [5], target)


REGEX = "(ab|ba|c)(d|ee|a)*b?"


def run(engine: Any, samples: int, letters: Letters) -> Counter[tuple[int, ...]]:
    params = SamplingParams(temperature=1.0, max_tokens=3, stop_token_ids=[5], include_stop_str_in_output=True)
    requests = [engine.add_request(LAW_PROMPT, params, mask=letters.mask(engine.target)) for _ in range(samples)]
    while engine.has_work:
        engine.step()
    return Counter(tuple(request.output.token_ids) for request in requests)


def law(engine: Any, letters: Letters) -> dict[tuple[int, ...], float]:
    """By enumeration, with an independent judge of what may follow."""
    pattern = re.compile(REGEX)
    complete = ["".join("abcde"[i] for i in word) for word in _words(6)]
    words = [word for word in complete if pattern.fullmatch(word)]

    def allowed(prefix: list[int]) -> list[int]:
        if 5 in prefix:
            return []
        text = "".join("abcde"[i] for i in prefix)
        following = {word[len(text)] for word in words if word.startswith(text) and len(word) > len(text)}
        return [*("abcde".index(letter) for letter in following), *([5] if pattern.fullmatch(text) else [])]

    found: dict[tuple[int, ...], float] = {}
    done: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(1, 4):
        grown = law_under(engine.target, SamplingParams(temperature=1.0), allowed, length)
        done = grown
        found.update({text: mass for text, mass in grown.items() if text[-1] == 5 and len(text) == length})
    found.update({text: mass for text, mass in done.items() if text[-1] != 5})
    return found


def _words(longest: int) -> list[tuple[int, ...]]:
    words: list[tuple[int, ...]] = [()]
    for _ in range(longest):
        words += [(*word, letter) for word in words if len(word) == len(words[-1]) for letter in range(5)]
    return words


@pytest.mark.filterwarnings("ignore:invalid value")  # of a law after its end
@pytest.mark.statistical
@pytest.mark.parametrize("drafter", ["none", "dspark", "prompt-lookup", "combined-dspark"])
def test_the_constrained_law_is_exact(drafter: str) -> None:
    letters, engine = Letters(REGEX), law_engine(drafter)
    expected = law(engine, letters)
    assert abs(sum(expected.values()) - 1) < 1e-6
    got, distance = p_value(run(engine, 5000, letters), expected)
    assert distance < 0.1
    assert got > LEVEL
    assert drafter == "none" or engine.statistics.blocks.accepted > 100


@pytest.mark.filterwarnings("ignore:invalid value")  # of a law after its end
@pytest.mark.statistical
def test_a_mask_of_the_blocks_start_alone_fails_the_same_test(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = masks.masked

    def at_the_start(logits: Any, by_slot: Any, history: Any, slots: Any, begins: Any, ends: Any, *rest: Any) -> Any:
        first = torch.stack([ends[slots == slot].min() for slot in slots])
        return honest(logits, by_slot, history, slots, begins, first, *rest)

    letters, engine = Letters(REGEX), law_engine("dspark")
    expected = law(engine, letters)
    monkeypatch.setattr(distribution, "masked", at_the_start)
    assert p_value(run(engine, 5000, letters), expected)[0] < LEVEL


# -- the free part ---------------------------------------------------------------------------------------------------------


def follow(structured: StructuredOutput, target: Target, text: str) -> list[set[str]]:
    """Which single letters may follow at every position of a text, asked in a random order with jumps back."""
    mask = Grammars(target).mask(structured, target.eos_token_ids)
    ids = tokenizer()(text)["input_ids"]
    names = {"a": 0, "1": 0, "{": 0}
    for name in names:
        (names[name],) = tokenizer()(name)["input_ids"]
    found: list[set[str]] = [set() for _ in range(len(ids) + 1)]
    order = list(range(len(ids) + 1)) * 3
    Random(7).shuffle(order)
    for count in order:
        allowed = mask.allowed(ids[:count])
        now = {name for name, token in names.items() if allowed[token]}
        if allowed[target.tokenizer.eos_token_id]:
            now.add("end")
        assert not found[count] or found[count] == now, "an answer depends on what was asked before"
        found[count] = now
    return found


def test_the_form_begins_where_the_reasoning_ends(target: Target) -> None:
    structured = StructuredOutput(regex="[0-9]{2}", starts_after="</think>")
    said = "ab</think>11"
    found = follow(structured, target, said)
    count = len(tokenizer()("ab</think>")["input_ids"])
    assert all({"a", "1", "{", "end"} == allowed for allowed in found[:count])
    assert found[count:] == [{"1"}, {"1"}, {"end"}]


def test_the_form_begins_inside_a_token(target: Target) -> None:
    """The end of the reasoning and the beginning of the answer are one token."""
    said = "ab stop11"
    assert len(tokenizer()(said)["input_ids"]) == 4  # one of them is " stop"
    found = follow(StructuredOutput(regex="top[0-9]{2}", starts_after=" s"), target, said)
    assert found == [{"a", "1", "{", "end"}] * 2 + [{"1"}, {"1"}, {"end"}]


@pytest.mark.parametrize("thinks", [True, False])
def test_the_free_part_may_be_left_out(target: Target, thinks: bool) -> None:
    structured = StructuredOutput(regex="[0-9]{2}", starts_after="</think>", free_from="<think>")
    found = follow(structured, target, "<think>a</think>11" if thinks else "11")
    assert found[0] == {"1"}  # and the marker, which is none of the letters asked for
    if thinks:
        assert found[1:] == [{"a", "1", "{", "end"}] * 2 + [{"1"}, {"1"}, {"end"}]
    else:
        assert found[1:] == [{"1"}, {"end"}]


def test_a_block_in_which_the_reasoning_ends_is_right_at_every_position() -> None:
    """The script reasons and then answers: markers lie inside drafted blocks. Speculation changes nothing."""
    from tests.serving.server import engine, scripted

    said = "hm stop stop stop</think>4242"
    structured = StructuredOutput(regex="[0-9]{4}", starts_after="</think>")
    params = SamplingParams(
        temperature=0, max_tokens=40, structured=structured, prediction=tokenizer()(said)["input_ids"]
    )
    answers = []
    for drafter in ("prompt-lookup", "none"):
        with engine(scripted(said), drafter, width=4 if drafter != "none" else None) as llm:
            (output,) = llm.generate("<|assistant|>", params, progress=False)
            answers.append((output.text, output.finish_reason))
            accepted = output.statistics.accepted
            assert (accepted > 5) == (drafter != "none")
    assert answers == [(said, "stop")] * 2


# -- refusals --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json_schema": '{"type": '}, "json_schema is not valid JSON"),
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be used"),
        ({"regex": "(ab"}, "regex cannot be used"),
        ({"grammar": "root = nothing"}, "grammar cannot be used"),
        ({"choice": []}, "choice is"),
        ({"choice": ["a", ""]}, "choice contains"),
        ({"regex": "a", "json_object": True}, "2 forms"),
        ({}, "0 forms"),
        ({"regex": "a" * (1 << 19)}, "characters"),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "odd"}}}, "structural_tag cannot be used"),
    ],
)
def test_forms_that_cannot_be_are_refused_in_one_line(target: Target, form: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        Grammars(target).mask(StructuredOutput(**form), target.eos_token_ids)
    assert "\n" not in str(refusal.value)


def test_what_contradicts_a_form_is_refused() -> None:
    form = StructuredOutput(regex="a")
    for name, value in (("min_tokens", 3), ("ignore_eos", True)):
        with pytest.raises(RequestError, match=f"{name} and structured"):
            SamplingParams(structured=form, **{name: value})
    with pytest.raises(RequestError, match="a StructuredOutput"):
        SamplingParams(structured={"regex": "a"})  # type: ignore[arg-type]


def test_an_engine_for_everybody_keeps_forms_apart(target: Target) -> None:
    with LLM(target, drafter="prompt-lookup", gamma=4, cost_table="none", max_model_len=128) as llm:
        forms = [StructuredOutput(choice=[word]) for word in ("stop", "presidencia", "abcd")]
        params = [SamplingParams(temperature=1.0, n=3, structured=form) for form in forms]
        outputs = llm.generate(["a", "b", "c"], params, progress=False)
    for output, word in zip(outputs, ("stop", "presidencia", "abcd"), strict=True):
        assert [answer.text for answer in output.completions] == [word] * 3
        assert all(answer.finish_reason == "stop" for answer in output.completions)
