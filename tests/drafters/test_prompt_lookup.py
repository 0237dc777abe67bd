"""Prompt lookup against a reference that reads like the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.drafters.base import DraftContext
from surefoot.drafters.prompt_lookup import PromptLookupDrafter
from surefoot.errors import ConfigurationError
from surefoot.kernels import native


def naive(text: list[int], gamma: int, max_match: int, min_match: int) -> tuple[list[int], int]:
    """Longest match of the suffix, latest among equals; the text after it, repeated with the distance as period."""
    best_length, best_end = 0, -1
    for end in range(len(text) - 1):
        length = 0
        while length < max_match and length <= end and text[end - length] == text[len(text) - 1 - length]:
            length += 1
        if length and length >= best_length:
            best_length, best_end = length, end
    if best_length < min_match:
        return [], 0
    tail = text[best_end + 1 :]
    return [tail[k % len(tail)] for k in range(gamma)], best_length


@pytest.fixture(params=["one native call", "tensor operations"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of finding it, which are to agree in everything."""
    if request.param == "one native call" and not native.available():
        pytest.skip("no native kernels here")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tensor operations":
            patch.setattr(native, "usable", lambda *tensors: False)
        yield


def draft_of(texts: list[list[int]], drafter: PromptLookupDrafter, *, slack: int = 0, slots: list[int] | None = None):
    """Draft for texts whose last token is the anchor; what comes after the anchor is garbage that would match."""
    slots = list(range(len(texts))) if slots is None else slots
    history = torch.full((max(slots) + 1, max(map(len, texts)) + slack + 8), 1)
    for slot, text in zip(slots, texts, strict=True):
        history[slot, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) - 1 for text in texts])
    context = DraftContext(torch.tensor(slots), lengths, history, None, int(lengths.max()) + slack)
    return drafter.propose(context, None)


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=24), min_size=1, max_size=4),
    gamma=st.integers(1, 6),
    max_match=st.integers(1, 5),
    min_match=st.integers(1, 5),
    slack=st.integers(0, 5),
)
def test_equals_the_definition(texts, gamma, max_match, min_match, slack) -> None:
    drafter = PromptLookupDrafter(gamma, max_match=max_match, min_match=min(min_match, max_match))
    draft = draft_of(texts, drafter, slack=slack, slots=list(reversed(range(len(texts)))))
    assert draft.point_mass
    assert draft.tokens.dtype == torch.int64
    for row, text in enumerate(texts):
        tokens, length = naive(text, gamma, max_match, drafter.min_match)
        assert draft.lengths[row] == len(tokens)
        assert draft.signal[row].tolist() == [float(length)] * gamma
        if tokens:
            assert draft.tokens[row].tolist() == tokens


@pytest.mark.parametrize(
    ("text", "proposal"),
    [
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),  # the text after the match
        ([5, 6, 1, 5, 6, 2, 5, 6], [2, 5, 6, 2]),  # the more recent of two, then around again
        ([4, 5, 6, 1, 5, 6, 2, 4, 5, 6], [1, 5, 6, 2]),  # the longer one, although older
        ([7, 7, 7], [7, 7, 7, 7]),  # match and suffix overlap
        ([1, 2, 3, 4], []),
        ([1], []),
    ],
)
def test_examples(text, proposal) -> None:
    draft = draft_of([text], PromptLookupDrafter(4))
    assert draft.tokens[0, : draft.lengths[0]].tolist() == proposal


def test_no_match_still_names_valid_tokens() -> None:
    """A fixed-shape consumer may pack the row before it looks at `lengths`."""
    assert draft_of([[1, 2, 3]], PromptLookupDrafter(3)).tokens.tolist() == [[3, 3, 3]]


def test_reads_nothing_after_the_anchor() -> None:
    """Provisional drafts of the last step stand there; the same request must draft the same."""
    drafter = PromptLookupDrafter(3)
    text = torch.tensor([[1, 2, 3, 1, 2, 0, 0, 0], [1, 2, 3, 1, 2, 9, 1, 2]])
    both = drafter.propose(DraftContext(torch.tensor([0, 1]), torch.tensor([4, 4]), text, None, 7))
    assert both.tokens[0].tolist() == both.tokens[1].tolist() == [3, 1, 2]


def test_no_device_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under fake tensors any value that leaves the device is an error; a device runs the tensor operations."""
    monkeypatch.setattr(native, "usable", lambda *tensors: False)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        context = DraftContext(
            torch.empty(3, dtype=torch.int64),
            torch.empty(3, dtype=torch.int64),
            torch.empty(5, 64, dtype=torch.int64),
            None,
            40,
        )
        assert PromptLookupDrafter(4).propose(context).tokens.shape == (3, 4)


@pytest.mark.parametrize(
    ("gamma", "limits"),
    [(0, {}), (3, {"min_match": 0}), (3, {"min_match": 9, "max_match": 4}), (3, {"max_match": 256})],
)
def test_bad_options(gamma, limits) -> None:
    with pytest.raises(ConfigurationError, match=r"gamma is 0|min_match"):
        PromptLookupDrafter(gamma, **limits)


def test_the_native_call_is_made_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PromptLookupDrafter, context: DraftContext) -> None:
        raise AssertionError("tensor operations")

    monkeypatch.setattr(PromptLookupDrafter, "_find", refuse)
    if native.usable(torch.zeros(1)):
        assert draft_of([[5, 6, 7, 5, 6]], PromptLookupDrafter(2)).tokens.tolist() == [[7, 5]]
    else:
        with pytest.raises(AssertionError, match="tensor operations"):
            draft_of([[5, 6, 7, 5, 6]], PromptLookupDrafter(2))
