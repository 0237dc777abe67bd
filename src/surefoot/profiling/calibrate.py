"""`surefoot calibrate`: what a drafter's confidence head says, against what the target then accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from surefoot.bench.prompts import BenchPrompt, chat_tokens
from surefoot.engine.trace import StepReport
from surefoot.errors import CalibrationError
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration, Outcomes, PositionQuality, quality_by_position

if TYPE_CHECKING:
    from surefoot.drafters.base import Drafter
    from surefoot.llm import LLM

Floats = npt.NDArray[np.float64]


def require_head(drafter: Drafter | None) -> None:
    """Raise `CalibrationError` for a drafter that has no confidence head."""
    if drafter is None or not drafter.has_confidence_head:
        raise CalibrationError(
            f"the drafter {drafter.name if drafter else 'none'} has no confidence head to calibrate, and needs no file: "
            "the online estimator learns its confidences while it serves"
        )


class Collector:
    """An observer that keeps the confidence logits and outcomes of all blocks."""

    def __init__(self) -> None:
        self._logits: list[Floats] = []
        self._accepted: list[int] = []
        self._widths: list[int] = []

    def __call__(self, report: StepReport) -> None:
        count, logits = report.inputs.num_drafted, report.outputs.confidence_logits
        if count and logits is not None:
            self._logits.append(logits.to(torch.float64).numpy())
            self._accepted += report.outputs.accepted[:count]
            self._widths += report.outputs.widths

    @property
    def logits(self) -> Floats:
        """[N, gamma]."""
        if not self._logits:
            raise CalibrationError("no block was drafted: give longer or more prompts, or raise --max-tokens")
        return np.concatenate(self._logits)

    @property
    def outcomes(self) -> Outcomes:
        return Outcomes(np.array(self._accepted, np.int64), np.array(self._widths, np.int64))


def collect(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    progress: Callable[[float], None] | None = None,
) -> Collector:
    """Answer all prompts, turn by turn, with every draft verified.

    Args:
        llm: made with `cost_table="none"`, so that it verifies everything.
        params: of every answer.
    """
    require_head(llm.engine.drafter)
    collector = Collector()
    llm.engine.add_observer(collector)
    try:
        conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
        rounds = max(len(prompt.turns) for prompt in prompts)
        for turn in range(rounds):
            asked = [index for index, prompt in enumerate(prompts) if turn < len(prompt.turns)]
            texts: list[Any] = []
            for index in asked:
                prompt, messages = prompts[index], conversations[index]
                messages.append({"role": "user", "content": prompt.turns[turn]})
                chats = prompt.chat and getattr(llm.tokenizer, "chat_template", None)
                texts.append(chat_tokens(llm.tokenizer, messages) if chats else prompt.turns[turn])
            for index, output in zip(asked, llm.generate(texts, params), strict=True):
                conversations[index].append({"role": "assistant", "content": output.text})
            if progress is not None:
                progress((turn + 1) / rounds)
    finally:
        llm.engine.remove_observer(collector)
    return collector


def quality(logits: Floats, outcomes: Outcomes, calibration: Calibration) -> list[PositionQuality]:
    """Of the survival under a calibration, position by position."""
    confidence = calibration.apply(torch.from_numpy(logits))
    return quality_by_position(confidence.cumprod(-1).numpy(), outcomes)
