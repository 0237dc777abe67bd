"""What a request cost and gained, as one line for people and as one object for programs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from surefoot.engine.output import TokenLogprobs
    from surefoot.engine.results import Completion, RequestOutput
    from surefoot.llm import LLM
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


def output_as_dict(output: RequestOutput, tokenizer: Any = None) -> dict[str, Any]:
    """One finished request, JSON-ready. Times are in seconds; log-probabilities are there where they were asked for, and
    `completions` where several answers were."""
    found = {
        **_answer_as_dict(output.completions[0], tokenizer),
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(answer.token_ids) for answer in output.completions),
        "cached_tokens": output.cached_tokens,
    }
    if len(output.completions) > 1:
        found["completions"] = [
            {"index": answer.index, **_answer_as_dict(answer, tokenizer)} for answer in output.completions
        ]
    return found


def _answer_as_dict(answer: Completion, tokenizer: Any) -> dict[str, Any]:
    timing = answer.timing
    found: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "statistics": statistics_as_dict(answer.statistics),
        "timing": {
            "prefill_s": timing.prefill_s,
            "decode_s": timing.decode_s,
            "tokens_per_s": timing.tokens_per_s,
        },
    }
    if answer.error is not None:
        found["error"] = answer.error
    if answer.logprobs is not None:
        found["logprobs"] = [token_logprobs(entry, tokenizer) for entry in answer.logprobs]
    return found


def error_of(output: RequestOutput) -> str | None:
    """Why the engine gave an answer up, if it did."""
    return next((answer.error for answer in output.completions if answer.error is not None), None)


def token_logprobs(entry: TokenLogprobs, tokenizer: Any = None) -> dict[str, Any]:
    """One emitted token and the likeliest ones at its place, natural logarithms, with their texts."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text = {} if tokenizer is None else {"token": tokenizer.decode([token_id])}
        return {"token_id": token_id, **text, "logprob": logprob}

    return {**named(entry.token_id, entry.logprob), "top": [named(*pair) for pair in entry.top]}


def logprobs_lines(output: Completion, tokenizer: Any = None) -> list[str]:
    """A line per emitted token: its log-probability, its text, and those of the likeliest tokens."""

    def shown(entry: dict[str, Any]) -> str:
        return f"{entry['logprob']:8.3f} {entry.get('token', entry['token_id'])!r}"

    lines = []
    for entry in output.logprobs or ():
        found = token_logprobs(entry, tokenizer)
        lines.append("  |".join([f"{shown(found):30s}", *map(shown, found["top"])]).rstrip())
    return lines


def json_ready(value: Any) -> Any:
    """`value` with null for every number that JSON does not have (NaN, infinities), at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


def json_line(value: dict[str, Any]) -> str:
    """One object on one line; what JSON cannot say (paths, dtypes) as its text."""
    return json.dumps(json_ready(value), ensure_ascii=False, default=str, allow_nan=False)


def print_json(value: dict[str, Any]) -> None:
    """One object on standard output; what JSON cannot say (paths, dtypes) as its text."""
    typer.echo(json.dumps(json_ready(value), indent=2, ensure_ascii=False, default=str, allow_nan=False))


def statistics_line(output: RequestOutput | Completion) -> str:
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


def planner_note(llm: LLM, profile_command: str | None = None) -> str:
    """Who drafts, and what decides the widths: `drafter prompt-lookup; planner verifies everything: no cost table …`.

    Args:
        profile_command: what measures a table for this engine, said where there is none.
    """
    engine = llm.describe()
    parts = [f"{name} {engine[name]}" for name in ("drafter", "planner") if engine.get(name)]
    if profile_command is not None and llm.lacks_cost_table:
        parts.append(f"measure one, once, with: {profile_command}")
    return "; ".join(parts)


def histogram_text(histogram: Sequence[int]) -> str:
    """Widths that occurred and how often: `0×3 4×10 7×20`."""
    return " ".join(f"{width}×{count}" for width, count in enumerate(histogram) if count)


def note(text: str) -> None:
    """A remark beside the output: on standard error, so that standard output holds the output alone."""
    with contextlib.suppress(OSError):  # a remark that cannot be shown is no reason to fail
        typer.secho(text, err=True, dim=True)


def complain(text: str, kind: str = "error") -> None:
    """What went wrong, in one line on standard error."""
    with contextlib.suppress(OSError):
        typer.echo(f"{kind}: {' '.join(text.split())}", err=True)


def alarm(text: str) -> None:
    """What must never happen, in red on standard error."""
    with contextlib.suppress(OSError):
        typer.secho(text, err=True, fg="red", bold=True)
