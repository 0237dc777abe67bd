"""The output path, rule by rule of the output contract, and against brute force on the full decode."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from surefoot.engine.output import (
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    OutputEvent,
    OutputProcessor,
    TokenLogprobs,
    certain,
    detokenizer_for,
)
from surefoot.errors import RequestError
from surefoot.sampling import SamplingParams
from tests.tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL, BYTE_FALLBACK, STRIPPING = byte_level_tokenizer(), byte_fallback_tokenizer(), byte_fallback_tokenizer(True)
HALF_A_SURROGATE = [169, 94]  # of BYTE_LEVEL: bytes ED A1
KINDS = {"byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK}


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Ids of `text`, one or more per character."""
    if tokenizer is BYTE_LEVEL:
        return tokenizer.encode(text)
    ids = []
    for character in text.replace(" ", "▁"):
        known = tokenizer.get_vocab().get(character)
        raw = [tokenizer.get_vocab()[f"<0x{byte:02X}>"] for byte in character.encode()]
        ids += raw if known is None else [known]
    return ids


def run(
    tokenizer: Any,
    blocks: Sequence[Sequence[int]],
    eos: Sequence[int] = (),
    prompt: Sequence[int] = (),
    **params: Any,
) -> tuple[OutputProcessor, list[OutputEvent]]:
    processor = OutputProcessor(SamplingParams(**params), tokenizer, eos, prompt)
    events = [processor.push(block) for block in blocks]
    assert "".join(event.text for event in events) == processor.text
    return processor, events


# --- brute force ------------------------------------------------------------------------------------------------------

codecs.register_error("each-byte", lambda error: (REPLACEMENT * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def fallback_text(ids: Sequence[int], final: bool) -> str:
    """SentencePiece's reading: all bytes in a row, one replacement character per malformed byte."""
    raw = b""
    for piece in BYTE_FALLBACK.convert_ids_to_tokens(list(ids)):
        if piece.startswith("<0x"):
            raw += bytes([int(piece[3:5], 16)])
        elif piece not in ("<unk>", "<end>"):
            raw += piece.replace("▁", " ").encode()
    return codecs.getincrementaldecoder("utf-8")("each-byte").decode(raw, final)


def full_text(kind: str, ids: Sequence[int], final: bool) -> str:
    """Text of all ids at once; unless `final`, without what the next token may still change."""
    if kind == "byte-fallback":
        return fallback_text(ids, final)
    if final:
        return BYTE_LEVEL.decode(list(ids), skip_special_tokens=True)
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    names = "".join(BYTE_LEVEL.convert_ids_to_tokens([token for token in ids if token != BYTE_LEVEL.eos_token_id]))
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(byte_of[name] for name in names))


def brute_force(kind: str, ids: Sequence[int], params: SamplingParams, eos: int) -> tuple[int, str, str | None, Any]:
    """(tokens kept, text, finish reason, stop reason), by decoding everything again after every token."""
    for count in range(1, len(ids) + 1):
        last = ids[count - 1]
        if last == eos or last in params.stop_token_ids:
            text = full_text(kind, ids[: count if params.include_stop_str_in_output else count - 1], True)
            return count, text, "stop", last if last in params.stop_token_ids else None
        text = full_text(kind, ids[:count], False)
        ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in params.stop_strings if stop in text]
        if ends:
            end, start, stop = min(ends)
            return count, text[: end if params.include_stop_str_in_output else start], "stop", stop
        if count == params.max_tokens:
            return count, full_text(kind, ids[:count], True), "length", None
    return len(ids), full_text(kind, ids, True), None, None


@st.composite
def cases(draw: st.DrawFn, kind: str) -> tuple[list[int], list[int], SamplingParams, int]:
    """Token ids (real text and noise), block sizes, parameters with stop strings cut from the text, end token."""
    tokenizer = KINDS[kind]
    words = st.sampled_from(["a stop is", "stop", "ab", " abc", "😀", "€", "été", "\u0303", " "]).map(
        lambda text: ids_of(tokenizer, text)
    )
    noise = st.lists(st.integers(0, len(tokenizer) - 1), max_size=4)
    parts = draw(st.lists(st.one_of(words, words, noise), max_size=12))
    ids = [token for part in parts for token in part]
    sizes = draw(st.lists(st.integers(1, 8), min_size=len(ids), max_size=len(ids)))
    text = full_text(kind, ids, False)
    cuts = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda c: text[c[0] : c[0] + c[1]])
    stops = draw(st.lists(st.one_of(cuts, st.text("ab stop€", min_size=1, max_size=3)), max_size=3))
    params = SamplingParams(
        stop=[stop for stop in stops if stop],
        stop_token_ids=draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=2)),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 40))),
        include_stop_str_in_output=draw(st.booleans()),
        logprobs=0,
    )
    return ids, sizes, params, tokenizer.eos_token_id


@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_blocks_gives_what_brute_force_on_the_full_decode_gives(kind: str) -> None:
    @settings(max_examples=200, deadline=None)
    @given(cases(kind))
    def check(case: tuple[list[int], list[int], SamplingParams, int]) -> None:
        ids, sizes, params, eos = case
        kept, text, finish, stop = brute_force(kind, ids, params, eos)
        single = OutputProcessor(params, KINDS[kind], [eos], [])
        events = [single.push([token], [TokenLogprobs(token, -float(token))]) for token in ids]
        blocks = OutputProcessor(params, KINDS[kind], [eos], [])
        start, counted = 0, 0
        for size in sizes:
            block = ids[start : start + size]
            event = blocks.push(block, [TokenLogprobs(token, -float(token)) for token in block])
            alone = events[start : start + size]
            assert event.text == "".join(one.text for one in alone)
            assert event.token_ids == [token for one in alone for token in one.token_ids]
            assert event.logprobs == [entry for one in alone for entry in one.logprobs or []]
            assert event.num_kept == len(event.token_ids) == sum(one.num_kept for one in alone)
            if alone:
                assert (event.finish_reason, event.stop_reason) == (alone[-1].finish_reason, alone[-1].stop_reason)
            start, counted = start + size, counted + event.num_kept
        if not blocks.finished:
            blocks.abort()
            finish = "abort"
        assert (counted, blocks.text, blocks.finish_reason, blocks.stop_reason) == (kept, text, finish, stop)
        assert blocks.token_ids == ids[:kept]

    check()


@pytest.mark.parametrize("kind", KINDS)
@given(
    words=st.lists(st.sampled_from(["stop", " a", "😀", "€uro", "é", "\n", "日本語"]), max_size=20),
    cut=st.integers(0, 80),
)
@settings(max_examples=100, deadline=None)
def test_text_continues_the_prompt_exactly_as_the_tokenizer_decodes_both(kind: str, words: list[str], cut: int) -> None:
    tokenizer = KINDS[kind]
    ids = ids_of(tokenizer, "".join(words))
    while cut < len(ids) and certain(full_text(kind, ids[:cut], True)) != full_text(kind, ids[:cut], True):
        cut += 1  # not inside a character
    for stream in (Detokenizer(tokenizer, ids[:cut]), detokenizer_for(tokenizer, ids[:cut])):
        text = "".join(map(stream.push, ids[cut:])) + stream.flush()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 300), max_size=24), cut=st.integers(0, 24), skip=st.booleans())
@example(ids=HALF_A_SURROGATE, cut=2, skip=False)  # Python's decoder waits for its third byte, the tokenizer does not
@example(ids=[*HALF_A_SURROGATE, 94], cut=2, skip=False)
@example(ids=[*HALF_A_SURROGATE, 10], cut=2, skip=False)
@settings(max_examples=300, deadline=None)
def test_strings_of_bytes_read_as_the_tokenizer_reads_them(ids: list[int], cut: int, skip: bool) -> None:
    """Malformed bytes in prompt and output included: the general way and the short one give the same text."""
    ids = [token for token in ids if token < len(BYTE_LEVEL)]
    streams = Detokenizer(BYTE_LEVEL, ids[:cut], skip), ByteDetokenizer(BYTE_LEVEL, ids[:cut], skip)
    one, other = ("".join(map(stream.push, ids[cut:])) + stream.flush() for stream in streams)
    assert one == other
    if not cut:
        assert one == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


# --- the output contract, line by line --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_line_1_one_ordered_block_is_one_event_and_deltas_concatenate_to_the_text(kind: str) -> None:
    ids = ids_of(KINDS[kind], "la presidencia de la república")
    processor, events = run(KINDS[kind], [ids[:3], ids[3:4], ids[4:9], ids[9:]])
    assert [event.num_kept for event in events] == [3, 1, 5, len(ids) - 9]
    assert processor.text == KINDS[kind].decode(ids) == "la presidencia de la república"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_line_2_stop_string_is_found_across_blocks_and_wholly_inside_one(kind: str, size: int) -> None:
    ids = ids_of(KINDS[kind], "a b c s-t-o-p tail that is much longer than any look-back window would be")
    blocks = [ids[start : start + size] for start in range(0, len(ids), size)]
    processor, events = run(KINDS[kind], blocks, stop="s-t-o-p")
    assert processor.text == "a b c "
    assert (processor.finish_reason, processor.stop_reason) == ("stop", "s-t-o-p")
    assert sum(event.num_kept for event in events) == len(processor.token_ids) < len(ids)


def test_line_2_stop_string_deep_inside_a_block_of_many_characters_is_found() -> None:
    tokenizer = BYTE_LEVEL
    ids = ids_of(tokenizer, "ab") + ids_of(tokenizer, "\n\n") + ids_of(tokenizer, "presidencia " * 5)
    processor, _ = run(tokenizer, [ids], stop=["\n\n"])
    assert processor.text == "ab"


def test_line_2_the_stop_string_complete_first_wins_and_then_the_longest() -> None:
    ids = ids_of(BYTE_FALLBACK, "abcde")
    assert run(BYTE_FALLBACK, [ids], stop=["abcd", "c"])[0].text == "ab"
    assert run(BYTE_FALLBACK, [ids], stop=["cd", "bcd", "d"])[0].stop_reason == "bcd"


@pytest.mark.parametrize("token", ["stop id", "end", "string"])
def test_line_3_everything_after_a_stop_is_dropped_everywhere(token: str) -> None:
    tokenizer = BYTE_FALLBACK
    a, b, c, d = ids_of(tokenizer, "abcd")
    params: dict[str, Any] = {"stop id": {"stop_token_ids": [c]}, "end": {}, "string": {"stop": "c"}}[token]
    processor = OutputProcessor(SamplingParams(logprobs=1, **params), tokenizer, [c] if token == "end" else [], [])
    block = [a, b, c, d, d]
    event = processor.push(block, [TokenLogprobs(t, -0.5, [(t, -0.5)]) for t in block])
    assert (event.text, event.token_ids, event.num_kept, event.finish_reason) == ("ab", [a, b, c], 3, "stop")
    assert event.logprobs is not None
    assert [entry.token_id for entry in event.logprobs] == [a, b, c]
    assert event.stop_reason == {"stop id": c, "end": None, "string": "c"}[token]
    after = processor.push([d], [TokenLogprobs(d, -0.5)])
    assert (after.text, after.token_ids, after.num_kept) == ("", [], 0)
    assert processor.text == "ab"


def test_line_4_stop_inside_the_budget_beats_the_cap_and_a_stop_beyond_it_does_not() -> None:
    ids = ids_of(BYTE_FALLBACK, "abcde")
    inside, _ = run(BYTE_FALLBACK, [ids], stop="c", max_tokens=4)
    assert (inside.finish_reason, inside.text) == ("stop", "ab")
    on_it, _ = run(BYTE_FALLBACK, [ids], stop="d", max_tokens=4)
    assert (on_it.finish_reason, on_it.text) == ("stop", "abc")
    beyond, events = run(BYTE_FALLBACK, [ids], stop="e", max_tokens=4)
    assert (beyond.finish_reason, beyond.text, events[0].num_kept) == ("length", "abcd", 4)


@pytest.mark.parametrize("cap", [1, 2, 3, 7])
def test_line_4_never_more_than_max_tokens(cap: int) -> None:
    ids = ids_of(BYTE_LEVEL, "presidencia")
    blocks = [ids[:2], ids[2:], ids, ids]
    processor, events = run(BYTE_LEVEL, blocks, max_tokens=cap)
    assert len(processor.token_ids) == sum(event.num_kept for event in events) == cap
    assert processor.finish_reason == "length"


def test_line_5_end_token_inside_a_block_ends_the_request_there() -> None:
    tokenizer = BYTE_LEVEL
    ids, end = ids_of(tokenizer, "ab abc"), tokenizer.eos_token_id
    processor, events = run(tokenizer, [[*ids, end, *ids]], eos=[end])
    assert processor.text == "ab abc"
    assert (events[0].num_kept, events[0].finish_reason, events[0].stop_reason) == (len(ids) + 1, "stop", None)
    ignoring, _ = run(tokenizer, [[*ids, end, *ids]], eos=[end], ignore_eos=True)
    assert (ignoring.text, ignoring.finish_reason) == ("ab abcab abc", None)


def test_line_5_a_named_stop_id_that_is_also_the_end_token_stops_even_if_ends_are_ignored() -> None:
    end = BYTE_LEVEL.eos_token_id
    processor, _ = run(BYTE_LEVEL, [[end, end]], eos=[end], ignore_eos=True, stop_token_ids=[end])
    assert (processor.finish_reason, processor.stop_reason, processor.token_ids) == ("stop", end, [end])


@pytest.mark.parametrize("kind", KINDS)
def test_line_6_a_character_spread_over_tokens_arrives_once_and_whole(kind: str) -> None:
    ids = ids_of(KINDS[kind], "日")  # three byte tokens
    assert len(ids) == 3
    _, events = run(KINDS[kind], [[ids[0]], [ids[1]], [ids[2]], ids[:1]])
    assert "".join(event.text for event in events) == "日"
    assert [event.text for event in events[:2]] == ["", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_line_6_held_back_text_is_flushed_at_the_end(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = ids_of(tokenizer, "a stop is")
    _, events = run(tokenizer, [ids[:-1], ids[-1:]], max_tokens=len(ids), stop="a stop isn't far")
    assert [event.text for event in events] == ["", "a stop is"]  # shorter than the hold-back, and still there
    cut, _ = run(tokenizer, [ids_of(tokenizer, "日")[:1]], max_tokens=1)
    assert cut.text == REPLACEMENT
    ended, _ = run(
        tokenizer, [[*ids_of(tokenizer, "ab"), tokenizer.eos_token_id]], [tokenizer.eos_token_id], stop="abc"
    )
    assert ended.text == "ab"


def test_line_6_text_in_front_of_a_stop_arrives_although_shorter_than_the_hold_back() -> None:
    ids = ids_of(BYTE_FALLBACK, "isabcabd")
    processor, events = run(BYTE_FALLBACK, [[token] for token in ids], stop=["abd", "abcabcabcabc"])
    assert (processor.text, processor.stop_reason) == ("isabc", "abd")
    assert "".join(event.text for event in events[:2]) == "is"  # nothing that cannot become a stop waits


class CountingTokenizer:
    """Counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run_of", ["text", "broken bytes", "emoji"])
def test_line_6_detokenisation_is_linear_in_the_output(kind: str, run_of: str) -> None:
    pieces = {"text": ids_of(KINDS[kind], "stop"), "emoji": ids_of(KINDS[kind], "𝄞日")}
    pieces["broken bytes"] = ids_of(KINDS[kind], "日")[1:2]
    costs = []
    for length in (400, 800):
        counting = CountingTokenizer(KINDS[kind])
        stream = Detokenizer(counting, [])
        counting.decoded = 0
        ids = (pieces[run_of] * length)[:length]
        text = "".join(map(stream.push, ids)) + stream.flush()
        assert text == full_text(kind, ids, True)
        costs.append(counting.decoded)
    assert costs[1] <= 2.1 * costs[0] <= 2.1 * 12 * 400


def test_line_6_a_first_space_is_kept_after_a_prompt_and_dropped_without_one_as_in_the_full_decode() -> None:
    word = STRIPPING.convert_tokens_to_ids("▁stop")
    prompt = ids_of(STRIPPING, "is")
    for before in ([], prompt, [STRIPPING.eos_token_id], prompt * 4):
        processor, _ = run(STRIPPING, [[word], [word, word]], prompt=before)
        assert STRIPPING.decode(before, skip_special_tokens=True) + processor.text == STRIPPING.decode(
            [*before, word, word, word], skip_special_tokens=True
        )


def test_line_6_a_character_that_the_prompt_began_is_completed() -> None:
    ids = ids_of(BYTE_LEVEL, "日")
    assert run(BYTE_LEVEL, [ids[1:]], prompt=ids[:1])[0].text == "日"
    a = ids_of(BYTE_LEVEL, "a")
    assert run(BYTE_LEVEL, [a], prompt=ids[:1])[0].text == "a"  # the unfinished one stays the prompt's


def test_line_7_one_logprob_entry_per_emitted_token() -> None:
    processor = OutputProcessor(SamplingParams(logprobs=0, max_tokens=3), None, [], [1, 2])
    first = processor.push([5, 6], [TokenLogprobs(5, -0.1), TokenLogprobs(6, -0.2)])
    second = processor.push([7, 8], [TokenLogprobs(7, -0.3), TokenLogprobs(8, -0.4)])
    assert first.logprobs == [TokenLogprobs(5, -0.1), TokenLogprobs(6, -0.2)]
    assert second.logprobs == [TokenLogprobs(7, -0.3)]
    assert processor.logprobs is not None
    assert [entry.token_id for entry in processor.logprobs] == processor.token_ids == [5, 6, 7]
    with pytest.raises(ValueError, match="came with none"):
        OutputProcessor(SamplingParams(logprobs=0), None, [], []).push([5])


def test_line_8_the_parameters_of_a_block_are_those_of_its_tokens_one_by_one() -> None:
    """min_tokens is the one rule of line 8 that the output path holds: it counts inside the block."""
    ids = ids_of(BYTE_FALLBACK, "abab")
    processor, _ = run(BYTE_FALLBACK, [ids], stop="b", min_tokens=3)
    assert (processor.text, len(processor.token_ids)) == ("aba", 4)
    by_id, _ = run(BYTE_FALLBACK, [ids], eos=[ids[1]], min_tokens=3)
    assert len(by_id.token_ids) == 4


def test_line_9_nothing_is_emitted_after_an_abort() -> None:
    ids = ids_of(BYTE_LEVEL, "ab abc")
    processor = OutputProcessor(SamplingParams(stop="abcd"), BYTE_LEVEL, [], [])
    processor.push(ids)
    ended = processor.abort()
    assert (ended.finish_reason, processor.text) == ("abort", "ab abc")
    assert ended.num_kept == 0
    after = processor.push(ids)
    assert (after.text, after.token_ids, after.num_kept) == ("", [], 0)
    assert processor.abort().text == ""
    assert processor.text == "ab abc"


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_stop_text_is_kept_on_request() -> None:
    ids = ids_of(BYTE_FALLBACK, "abcde")
    assert run(BYTE_FALLBACK, [ids], stop="bcd", include_stop_str_in_output=True)[0].text == "abcd"
    kept = run(BYTE_FALLBACK, [ids], stop_token_ids=[ids[2]], include_stop_str_in_output=True)[0]
    assert kept.text == "abc"
    end = BYTE_FALLBACK.eos_token_id
    shown = run(BYTE_FALLBACK, [[end]], [end], include_stop_str_in_output=True, skip_special_tokens=False)[0]
    assert shown.text == "<end>"


def test_special_tokens_are_shown_on_request_only() -> None:
    end = BYTE_LEVEL.eos_token_id
    ids = [*ids_of(BYTE_LEVEL, "ab"), end, *ids_of(BYTE_LEVEL, "ab")]
    assert run(BYTE_LEVEL, [ids])[0].text == "abab"
    assert run(BYTE_LEVEL, [ids], skip_special_tokens=False)[0].text == "ab<|end|>ab"


def test_context_length_caps_the_output() -> None:
    processor = OutputProcessor(SamplingParams(max_tokens=None), None, [], [1, 2, 3], max_model_len=5)
    event = processor.push([7, 8, 9])
    assert (event.token_ids, event.finish_reason, event.text) == ([7, 8], "length", "")


def test_without_a_tokenizer_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="use stop_token_ids"):
        OutputProcessor(SamplingParams(stop="x"), None, [], [])


def test_an_empty_block_is_an_empty_event() -> None:
    processor = OutputProcessor(SamplingParams(), BYTE_LEVEL, [], [], request_id="r1")
    assert processor.push([]) == OutputEvent(request_id="r1")
