"""What a request cost and gained, as one line for people and as one object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from surefoot.llm import LLM, RequestOutput
    from surefoot.speculation.statistics import RequestStatistics


def accepted_length(statistics: RequestStatistics) -> float:
    """Accepted draft tokens per step."""
    return statistics.accepted / statistics.steps if statistics.steps else 0.0


def width_histogram(statistics: RequestStatistics) -> list[int]:
    """Steps by width, from 0 to the widest that occurred."""
    return [statistics.widths[width] for width in range(max(statistics.widths, default=-1) + 1)]


def acceptance_by_position(statistics: RequestStatistics) -> list[float]:
    """[γ] share of the draft tokens verified at each position that were accepted."""
    verified = statistics.verified_by_position
    accepted = [*statistics.accepted_by_position, *[0] * len(verified)]  # ends at the last one ever accepted
    return [a / v for a, v in zip(accepted, verified, strict=False)]


def statistics_as_dict(statistics: RequestStatistics) -> dict[str, Any]:
    """Counters of one request; lists are indexed by draft position (0 is x₁), the histogram by width.

    `sources` counts the steps by who drafted, of a drafter that has several sources.
    """
    return {
        "steps": statistics.steps,
        "drafted": statistics.drafted,
        "verified": statistics.verified,
        "accepted": statistics.accepted,
        "emitted": statistics.emitted,
        "accepted_length": accepted_length(statistics),
        "verified_by_position": statistics.verified_by_position,
        "accepted_by_position": statistics.accepted_by_position,
        "acceptance_by_position": acceptance_by_position(statistics),
        "width_histogram": width_histogram(statistics),
        **({"sources": dict(statistics.sources)} if statistics.sources else {}),
    }


def output_as_dict(output: RequestOutput) -> dict[str, Any]:
    """One finished request, JSON-ready. Times are in seconds."""
    timing = output.timing
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "statistics": statistics_as_dict(output.statistics),
        "timing": {
            "prefill_s": timing.prefill_s,
            "decode_s": timing.decode_s,
            "tokens_per_s": timing.tokens_per_s,
        },
    }


def print_json(value: dict[str, Any]) -> None:
    """One object on standard output; what JSON cannot say (paths, dtypes) as its text."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def statistics_line(output: RequestOutput) -> str:
    """`64 tokens, 21.4 tok/s, 31 steps, accepted length 1.06, acceptance by position 62 41 20 %, stopped: length`."""
    statistics = output.statistics
    parts = [
        f"{len(output.token_ids)} tokens",
        f"{output.timing.tokens_per_s:.1f} tok/s",
        f"{statistics.steps} steps",
    ]
    if statistics.drafted:
        shares = " ".join(f"{100 * share:.0f}" for share in acceptance_by_position(statistics))
        parts += [
            f"accepted length {accepted_length(statistics):.2f}",
            f"acceptance by position {shares} %" if shares else "nothing verified",
        ]
        if statistics.sources:
            parts.append("drafted by " + ", ".join(f"{name} {n}" for name, n in statistics.sources.most_common()))
    else:
        parts.append("nothing drafted")
    parts.append(f"finished: {output.finish_reason}")
    return ", ".join(parts)


def planner_note(llm: LLM) -> str:
    """Who drafts, and what decides the widths: `drafter prompt-lookup; planner verifies everything: no cost table …`."""
    engine = llm.describe()
    return "; ".join(f"{name} {engine[name]}" for name in ("drafter", "planner") if engine.get(name))


def histogram_text(histogram: Sequence[int]) -> str:
    """Widths that occurred and how often: `0×3 4×10 7×20`."""
    return " ".join(f"{width}×{count}" for width, count in enumerate(histogram) if count)


def note(text: str) -> None:
    """A remark beside the output: standard error, so that standard output holds the output alone."""
    typer.secho(text, err=True, dim=True)
