"""What `surefoot demo` does and finds: prompts answered with and without speculation in one engine, compared.

Drafting is switched off per request, so both arms use the same kernels. They run one after the other on each prompt, and
take turns to be first: a machine that grows warm or busy slows both alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.cli.demo_prompts import DemoPrompt
from surefoot.cli.report import accepted_length, width_histogram
from surefoot.sampling import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM, RequestOutput, Stream
    from surefoot.speculation.statistics import RequestStatistics

TARGET_ONLY, SPECULATIVE = "target-only", "speculative"


class RunUpdate(NamedTuple):
    """What is running, for whoever shows it."""

    prompt: DemoPrompt
    arm: str
    text: str  # so far
    finished: RequestOutput | None


@dataclass
class Comparison:
    """All runs of one prompt."""

    prompt: DemoPrompt
    runs: dict[str, list[RequestOutput]] = field(default_factory=lambda: {TARGET_ONLY: [], SPECULATIVE: []})

    def whole_rounds(self) -> Comparison:
        """As far as both arms have run."""
        count = min(map(len, self.runs.values()))
        return Comparison(self.prompt, {arm: runs[:count] for arm, runs in self.runs.items()})

    def tokens_per_s(self, arm: str) -> float:
        """Median decode speed of an arm."""
        return median(run.timing.tokens_per_s for run in self.runs[arm])

    @property
    def tokens(self) -> int:
        """Length of an answer."""
        return len(self.runs[SPECULATIVE][0].token_ids)

    @property
    def speedup(self) -> float | None:
        """None where an answer ended at its first token: there is no decode speed."""
        return _ratio(self.tokens_per_s(SPECULATIVE), self.tokens_per_s(TARGET_ONLY))

    @property
    def statistics(self) -> RequestStatistics:
        """Of the speculative runs together."""
        from surefoot.speculation.statistics import RequestStatistics

        total = RequestStatistics()
        for run in self.runs[SPECULATIVE]:
            total.merge(run.statistics)
        return total

    @property
    def difference(self) -> str | None:
        """Where two of the runs differ first, or None if all are the same token for token."""
        runs = [run for arm in self.runs.values() for run in arm]
        first = runs[0]
        for other in runs[1:]:
            if other.token_ids == first.token_ids and other.text == first.text:
                continue
            pairs = enumerate(zip(first.token_ids, other.token_ids, strict=False))
            at = next((index for index, (a, b) in pairs if a != b), min(len(first.token_ids), len(other.token_ids)))
            return f"{self.prompt.name}: token {at} is {_at(first, at)} in one run and {_at(other, at)} in another"
        return None

    def as_dict(self, greedy: bool) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.prompt.name,
            "tokens": self.tokens,
            "target_only_tokens_per_s": self.tokens_per_s(TARGET_ONLY),
            "speculative_tokens_per_s": self.tokens_per_s(SPECULATIVE),
            "speedup": self.speedup,
            "accepted_length": accepted_length(self.statistics),
            "width_histogram": width_histogram(self.statistics),
            "identical": self.difference is None if greedy else None,
            "text": self.runs[SPECULATIVE][0].text,
        }


@dataclass(frozen=True)
class ComparisonReport:
    """What all comparisons together show."""

    comparisons: list[Comparison]
    greedy: bool
    peak_bytes: int | None

    @property
    def complaints(self) -> list[str]:
        """Everything that must not be; empty when all is well."""
        complaints = []
        if self.greedy:
            differences = [c.difference for c in self.comparisons if c.difference]
            complaints += [f"TEXTS DIFFER at temperature 0, which must never happen: {text}" for text in differences]
        if not any(comparison.statistics.drafted for comparison in self.comparisons):
            complaints.append("NOTHING WAS DRAFTED on any prompt: the speculative arm did not speculate")
        return complaints

    @property
    def verdict(self) -> str:
        """One sentence about the texts."""
        if not self.greedy:
            return "temperature above 0: texts are different draws from the same law, only speeds are compared"
        count = len(self.comparisons)
        same = sum(comparison.difference is None for comparison in self.comparisons)
        return f"texts identical on {same} of {count} prompts, token for token"

    def total_tokens_per_s(self, arm: str) -> float:
        """Decoded tokens of all prompts by the time they took."""
        runs = [run for comparison in self.comparisons for run in comparison.runs[arm]]
        seconds = sum(run.timing.decode_s for run in runs)
        decoded = sum(run.timing.tokens_per_s * run.timing.decode_s for run in runs)
        return decoded / seconds if seconds > 0 else 0.0

    @property
    def total_speedup(self) -> float | None:
        """None where every answer ended at its first token."""
        return _ratio(self.total_tokens_per_s(SPECULATIVE), self.total_tokens_per_s(TARGET_ONLY))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "prompts": [comparison.as_dict(self.greedy) for comparison in self.comparisons],
            "target_only_tokens_per_s": self.total_tokens_per_s(TARGET_ONLY),
            "speculative_tokens_per_s": self.total_tokens_per_s(SPECULATIVE),
            "speedup": self.total_speedup,
            "identical": all(c.difference is None for c in self.comparisons) if self.greedy else None,
            "verdict": self.verdict,
            "complaints": self.complaints,
            "peak_bytes": self.peak_bytes,
        }


def compare(
    llm: LLM,
    comparisons: list[Comparison],
    params: SamplingParams,
    repeats: int,
    show: Callable[[RunUpdate], None],
) -> None:
    """Run every prompt in both arms `repeats` times; the arm that goes first alternates."""
    for repeat in range(repeats):
        for index, comparison in enumerate(comparisons):
            arms = (TARGET_ONLY, SPECULATIVE) if (repeat + index) % 2 == 0 else (SPECULATIVE, TARGET_ONLY)
            for arm in arms:
                stream, text = stream_of(llm, comparison.prompt, params, arm), ""
                for event in stream:
                    text += event.text
                    show(RunUpdate(comparison.prompt, arm, text, None))
                comparison.runs[arm].append(stream.result)
                show(RunUpdate(comparison.prompt, arm, text, stream.result))


def stream_of(llm: LLM, prompt: DemoPrompt, params: SamplingParams, arm: str) -> Stream:
    """A stream of one arm; models without a chat template continue the question as text."""
    params = replace(params, speculative=arm == SPECULATIVE)
    if prompt.chat and getattr(llm.tokenizer, "chat_template", None):
        return llm.stream_chat([{"role": "user", "content": prompt.text}], params)
    return llm.stream(prompt.text, params)


def peak_memory() -> int | None:
    """Most memory this process ever had resident, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _ratio(speed: float, base: float) -> float | None:
    return speed / base if base > 0 else None


def _at(output: RequestOutput, index: int) -> str:
    return str(output.token_ids[index]) if index < len(output.token_ids) else "missing"
