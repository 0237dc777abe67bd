"""The same scripted answers through every API, by the official clients: streamed and whole, they say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.serving.server import Live, engine, scripted, serve, tokenizer

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: Any = [{"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS}]
COLD = {"temperature": 0}  # which the newest clients of Anthropic have no argument for
ASK: Any = [{"role": "user", "content": "weather?"}]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "é}", "days": 2}}\n</tool_call>'
SAID = {
    "text": "Hello, a stop is a stop.",
    "reasoned": "<think>\nhm, a stop\n</think>\n\nYes.",
    "call": CALL,
    "all": f"<think>so</think>Look: {CALL}\n{CALL}",
}
ARGUMENTS = {"city": "é}", "days": 2}
EXPECTED: dict[str, tuple[str, str, int]] = {
    "text": ("", SAID["text"], 0),
    "reasoned": ("hm, a stop", "Yes.", 0),
    "call": ("", "", 1),
    "all": ("so", "Look: ", 2),
}


@contextmanager
def saying(name: str, drafter: str = "prompt-lookup", **settings: Any) -> Iterator[Live]:
    said = SAID.get(name, name)
    settings = {"reasoning_parser": "think" if "think" in said else "none", **settings}
    with serve(engine(scripted(said), drafter, width=4 if drafter != "none" else None), **settings) as live:
        yield live


@pytest.fixture(scope="module", params=sorted(SAID))
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, Live]]:
    with saying(request.param) as live:
        yield request.param, live


def predicted(name: str) -> dict[str, Any]:
    """Drafts that lie across every marker."""
    return {"prediction": {"type": "content", "content": SAID[name]}}


def check(name: str, reasoning: str, text: str, calls: list[tuple[str, Any]]) -> None:
    expected = EXPECTED[name]
    assert (reasoning, text) == expected[:2]
    assert calls == [("get_weather", ARGUMENTS)] * expected[2]


@pytest.mark.parametrize("drafts", [True, False])
def test_chat(case: tuple[str, Live], drafts: bool) -> None:
    name, live = case
    client = live.openai()
    body = {**(predicted(name) if drafts else {}), "speculative": drafts}
    ask: Any = {"model": "tiny", "messages": ASK, "tools": CHAT_TOOLS, "temperature": 0, "extra_body": body}
    whole = client.chat.completions.create(**ask)
    (choice,) = whole.choices
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or []]
    check(name, getattr(choice.message, "reasoning_content", None) or "", choice.message.content or "", calls)
    assert choice.finish_reason == ("tool_calls" if calls else "stop")

    reasoning = text = ""
    parts: list[list[str]] = []
    usage = finish = None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for streamed in chunk.choices:
            finish = streamed.finish_reason or finish
            text += streamed.delta.content or ""
            reasoning += getattr(streamed.delta, "reasoning_content", None) or ""
            for call in streamed.delta.tool_calls or []:
                if call.id:
                    assert call.index == len(parts)
                    parts.append([call.function.name, ""])
                parts[call.index][1] += call.function.arguments or ""
    check(name, reasoning, text, [(n, json.loads(a)) for n, a in parts])
    assert finish == choice.finish_reason
    used = [u.model_dump(exclude={"prompt_tokens_details"}) for u in (usage, whole.usage)]
    assert used[0] == used[1]
    details = whole.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens > 5) == drafts
    assert details.rejected_prediction_tokens <= 5
    tokens = len(tokenizer()(SAID[name])["input_ids"])
    assert whole.usage.completion_tokens == tokens + 1
    before = SAID[name].partition("</think>")[0] + "</think>"
    assert details.reasoning_tokens == (len(tokenizer()(before)["input_ids"]) if "think" in SAID[name] else 0)


def test_responses(case: tuple[str, Live]) -> None:
    from openai.types.responses import Response

    name, live = case
    client = live.openai()
    ask: Any = {"model": "tiny", "input": ASK, "tools": RESPONSE_TOOLS, "temperature": 0, "extra_body": predicted(name)}
    whole = client.responses.create(**ask)
    Response.model_validate(whole.model_dump(by_alias=True))
    reasoning = "".join(part.text for item in whole.output if item.type == "reasoning" for part in item.content or [])
    calls = [(item.name, json.loads(item.arguments)) for item in whole.output if item.type == "function_call"]
    check(name, reasoning, whole.output_text.removesuffix("\n"), calls)
    assert whole.status == "completed"

    numbers, deltas, done = [], {"text": "", "reasoning": "", "arguments": ""}, None
    opened: list[str] = []
    for event in client.responses.create(**ask, stream=True):
        numbers.append(event.sequence_number)
        if event.type == "response.output_item.added":
            opened.append(event.item.id)
        elif event.type == "response.output_item.done":
            assert event.item.id == opened[event.output_index]
        elif event.type == "response.output_text.delta":
            deltas["text"] += event.delta
        elif event.type == "response.reasoning_text.delta":
            deltas["reasoning"] += event.delta
        elif event.type == "response.function_call_arguments.delta":
            deltas["arguments"] += event.delta
        elif event.type == "response.completed":
            done = event.response
    assert numbers == list(range(len(numbers)))
    assert done is not None
    assert done.output_text == whole.output_text == deltas["text"]
    assert deltas["reasoning"] == reasoning
    assert deltas["arguments"] == "".join(i.arguments for i in whole.output if i.type == "function_call")
    assert [item.type for item in done.output] == [item.type for item in whole.output]
    assert done.usage.output_tokens == whole.usage.output_tokens > 0
    with client.responses.stream(**ask) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == whole.output_text


def test_messages(case: tuple[str, Live]) -> None:
    from anthropic.types import Message

    name, live = case
    client = live.anthropic()
    ask: Any = {
        "model": "tiny",
        "messages": ASK,
        "tools": ANTHROPIC_TOOLS,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**ask)
    Message.model_validate(whole.model_dump())
    reasoning = "".join(block.thinking for block in whole.content if block.type == "thinking")
    text = "".join(block.text for block in whole.content if block.type == "text")
    calls = [(block.name, block.input) for block in whole.content if block.type == "tool_use"]
    check(name, reasoning, text.removesuffix("\n"), calls)
    assert whole.stop_reason == ("tool_use" if calls else "end_turn")
    with client.messages.stream(**ask) as stream:
        for _ in stream:
            pass
        final = stream.get_final_message()
    assert [b.model_dump(exclude={"id"}) for b in final.content] == [
        b.model_dump(exclude={"id"}) for b in whole.content
    ]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="tiny", messages=ASK, tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_stop_string_inside_a_call_is_no_call() -> None:
    with saying("call") as live:
        ask: Any = {"model": "tiny", "messages": ASK, "tools": CHAT_TOOLS, "temperature": 0}
        (cut,) = live.openai().chat.completions.create(**ask, stop=["days"]).choices
        assert cut.finish_reason == "stop"
        assert cut.message.tool_calls[0].function.arguments == '{"city": "é}", "'
        (short,) = live.openai().chat.completions.create(**ask, max_tokens=60).choices
        assert short.finish_reason == "length"


def test_anthropic_details() -> None:
    with saying("text", api_keys=("secret-key-1",)) as live:
        import anthropic

        with pytest.raises(anthropic.AuthenticationError) as refused:
            live.anthropic().messages.create(model="tiny", messages=ASK, max_tokens=5)
        assert refused.value.body["type"] == "error"
        client = live.anthropic(api_key="secret-key-1")
        cut = client.messages.create(model="tiny", messages=ASK, max_tokens=3, extra_body=COLD)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
        stopped = client.messages.create(
            model="tiny", messages=ASK, max_tokens=99, stop_sequences=["stop"], extra_body=COLD
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "stop")
        assert stopped.content[0].text == "Hello, a "
        image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            client.messages.create(model="tiny", messages=image, max_tokens=5)  # type: ignore[arg-type]
        agent: Any = {
            "model": "tiny",
            "max_tokens": 60,
            "system": [{"type": "text", "text": "You are careful.", "cache_control": {"type": "ephemeral"}}],
            "tools": [{**tool, "cache_control": {"type": "ephemeral"}} for tool in ANTHROPIC_TOOLS],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                        {"type": "text", "text": "and tomorrow?"},
                    ],
                },
            ],
        }
        first = client.messages.create(**agent, extra_body=COLD)
        again = client.messages.create(**agent, extra_body=COLD)
        assert first.content[0].text == again.content[0].text == SAID["text"]
        assert (again.usage.cache_read_input_tokens or 0) > 32, "the prompt was not reused"
        raw = httpx.post(
            f"{live.url}/v1/messages?beta=true", json={**agent, **COLD}, headers={"x-api-key": "secret-key-1"}
        )
        assert raw.status_code == 200
        assert raw.json()["content"][0]["text"] == SAID["text"]


def test_responses_details() -> None:
    with saying("text") as live:
        client = live.openai()
        import openai

        for field, value in (("previous_response_id", "resp_1"), ("background", True)):
            with pytest.raises(openai.BadRequestError, match="keeps no conversations"):
                client.responses.create(model="tiny", input="hi", **{field: value})
        cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2, temperature=0)
        assert cut.status == "incomplete"
        assert cut.incomplete_details.reason == "max_output_tokens"
        items: Any = [
            {"type": "message", "role": "developer", "content": "short"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "x"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ]
        included: Any = ["message.output_text.logprobs"]
        told = client.responses.create(model="tiny", input=items, temperature=0, include=included, top_logprobs=2)
        assert told.output_text == SAID["text"]
        assert len(told.output[0].content[0].logprobs) == told.usage.output_tokens
        assert told.store is False


@pytest.mark.parametrize("drafter", ["prompt-lookup", "none"])
def test_tool_choice_is_enforced(drafter: str) -> None:
    """The model would say something else; the grammar lets it say a call only."""
    said = "I would rather talk about stops."
    with saying(said, drafter) as live:
        client = live.openai()
        ask: Any = {"model": "tiny", "messages": ASK, "tools": CHAT_TOOLS, "temperature": 0, "max_tokens": 150}
        free = client.chat.completions.create(**ask)
        assert free.choices[0].message.content == said
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        answers = []
        for choice in ("required", named):
            answer = client.chat.completions.create(**ask, tool_choice=choice).choices[0]
            assert answer.message.tool_calls
            call = answer.message.tool_calls[0]
            assert call.function.name == "get_weather"
            answers.append(call.function.arguments)
            if answer.finish_reason == "tool_calls":
                assert "city" in json.loads(call.function.arguments)
        none = client.chat.completions.create(**ask, tool_choice="none")
        assert none.choices[0].message.content == said


def test_structured_answers_over_http() -> None:
    said = '{"name": "Bob", "n": 12}'
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
    with saying(said) as live:
        client = live.openai()
        ask: Any = {"model": "tiny", "messages": ASK, "temperature": 0, "max_tokens": 100}
        formats: list[Any] = [
            {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            {"type": "json_object"},
            {"type": "text"},
        ]
        for form in formats:
            assert client.chat.completions.create(**ask, response_format=form).choices[0].message.content == said
        text: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        assert client.responses.create(model="tiny", input="hi", temperature=0, text=text).output_text == said
        for extra in ({"regex": "[0-9]{3}"}, {"choice": ["red", "green"]}, {"grammar": 'root ::= "yes" | "no"'}):
            body = {"structured_outputs": extra}
            answer = client.chat.completions.create(**ask, extra_body=body).choices[0].message.content
            assert answer is not None
            assert answer.isdigit() if "regex" in extra else answer in ("red", "green", "yes", "no")
        guided = client.chat.completions.create(**ask, extra_body={"guided_choice": ["blue"]})
        assert guided.choices[0].message.content == "blue"
        import openai

        with pytest.raises(openai.BadRequestError, match="given together"):
            client.chat.completions.create(**ask, response_format=formats[1], extra_body={"guided_regex": "a"})
        bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}
        with pytest.raises(openai.BadRequestError, match="json_schema cannot be used"):
            client.chat.completions.create(**ask, response_format=bad)


def test_reasoning_that_the_template_opens() -> None:
    said = "so\n</think>\n\nYes."
    with saying(said) as live:
        client = live.openai()
        ask: Any = {"model": "tiny", "messages": ASK, "temperature": 0}
        thinking = client.chat.completions.create(**ask, reasoning_effort="high")
        assert thinking.choices[0].message.content == "Yes."
        assert thinking.choices[0].message.reasoning_content == "so"
        assert thinking.usage.completion_tokens_details.reasoning_tokens > 0
        schema: Any = {"guided_regex": "Yes[.]"}
        formed = client.chat.completions.create(**ask, reasoning_effort="high", extra_body=schema)
        assert formed.choices[0].message.content == "Yes."
        assert formed.choices[0].message.reasoning_content == "so"
