"""From a step's log-probabilities to the entries of its requests."""

from __future__ import annotations

import torch

from surefoot.drafters.base import Drafter
from surefoot.engine.device import HostOutputs
from surefoot.engine.messages import PromptRows, StepInputs
from surefoot.engine.output import TokenLogprobs
from surefoot.engine.request import Request
from surefoot.engine.scheduler import Scheduled
from surefoot.sampling import SamplingParams


def prompt_rows(parts: list[Scheduled]) -> list[PromptRows]:
    """The chunks of a step whose requests want log-probabilities of their prompt."""
    return [
        PromptRows(index, part.request.num_cached, part.context_rows, part.request.params.prompt_logprobs or 0)
        for index, part in enumerate(parts)
        if part.context_rows and part.request.output.wants_prompt
    ]


def take_prompt_logprobs(parts: list[Scheduled], inputs: StepInputs, outputs: HostOutputs) -> None:
    """Hand what a step computed about prompts to their requests."""
    row = 0
    for chunk in inputs.prompt_logprobs:
        found = outputs.prompt_logprobs[row : row + chunk.rows]
        parts[chunk.request].request.output.read_prompt(chunk.first, found)
        row += chunk.rows


def token_logprobs(
    params: SamplingParams, tokens: list[int], row: int, outputs: HostOutputs
) -> list[TokenLogprobs] | None:
    if params.logprobs is None or outputs.logprobs is None:
        return None
    entries = []
    for offset, token in enumerate(tokens):
        top: list[tuple[int, float]] = []
        if params.logprobs and outputs.top_tokens is not None and outputs.top_logprobs is not None:
            ranked = zip(outputs.top_tokens[row + offset], outputs.top_logprobs[row + offset], strict=True)
            top = list(ranked)[: params.logprobs]
        entries.append(TokenLogprobs(token, outputs.logprobs[row + offset], top))
    return entries


RECOVERED, BONUS, PLAIN = "recovered", "bonus", "target"
"""Origins of the token that ends a block: after a rejection, after drafts that were all accepted, without drafts."""


def origins(index: int, accepted: int, outputs: HostOutputs, drafter: Drafter | None) -> list[str]:
    """How each token of a request's block came.

    Args:
        index: of the request among the emitting ones; the drafted ones come first.
        drafter: names the source where it has only one.
    """
    width = outputs.widths[index] if index < len(outputs.widths) else 0
    if not width:
        return [PLAIN]
    source = outputs.sources[index] if outputs.sources is not None else None
    assert drafter is not None
    return [source or drafter.name] * accepted + [RECOVERED if accepted < width else BONUS]


def record_block(request: Request, index: int | None, accepted: int, kept: int, outputs: HostOutputs) -> None:
    """Count what a step has done for a request.

    Args:
        index: of its block among the drafted ones; None: it had no draft.
        kept: tokens that were emitted.
    """
    if index is None:
        request.statistics.record(0, 0, 0, kept)
        return
    proposed = len(outputs.drafts[index]) if outputs.proposed is None else outputs.proposed[index]
    source = None if outputs.sources is None else outputs.sources[index]
    request.statistics.record(proposed, outputs.widths[index], accepted, kept, source)


def no_distribution(dtype: torch.dtype, masked: bool = False) -> str:
    """Why a request ended whose next token had no distribution to come from, and what to do.

    Args:
        dtype: of the target.
        masked: whether the request has a `TokenMask`.
    """
    name = str(dtype).removeprefix("torch.")
    problem = f"the target's logits hold NaN or infinity, computed in {name}"
    if masked:
        problem = f"the request's mask allows no token here, or {problem}"
    remedy = {
        "float16": "its range is too small for this model: use --dtype bfloat16 or float32",
        "bfloat16": "try --dtype float32; if that fails, too, the weights themselves hold NaN: use another copy",
    }
    return f"{problem}: {remedy.get(name, 'the weights themselves may hold NaN or infinity: use another copy')}"
