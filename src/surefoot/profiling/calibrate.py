"""`surefoot calibrate`: what a drafter's confidence head says, against what the target then accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefoot.bench.prompts import BenchPrompt, chat_tokens
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.engine.trace import StepReport
from surefoot.errors import CalibrationError
from surefoot.sampling import SamplingParams
from surefoot.training.forced import Text
from surefoot.training.measure import Blocks, note_blocks
from surefoot.training.progress import Progress

if TYPE_CHECKING:
    from surefoot.drafters.base import Drafter
    from surefoot.llm import LLM


def require_head(drafter: Drafter | None) -> DSparkDrafter:
    """The drafter, without the calibration it has now. Raises `CalibrationError` where there is no confidence head."""
    if not isinstance(drafter, DSparkDrafter) or not drafter.has_confidence_head:
        raise CalibrationError(
            f"the drafter {drafter.name if drafter else 'none'} has no confidence head to calibrate, and needs no file: "
            "the online estimator learns its confidences while it serves"
        )
    drafter.calibration = None
    return drafter


def collect(
    llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams, progress: Progress, span: tuple[float, float]
) -> tuple[Blocks, list[Text]]:
    """Answer all prompts, turn by turn, with every draft verified: the blocks, and what was written.

    Args:
        llm: made with `cost_table="none"`, so that it verifies everything.
        params: of every answer.
        span: which part of `progress` this is.
    """
    blocks, texts = Blocks(llm.engine.gamma), list[Text]()

    def observe(report: StepReport) -> None:
        note_blocks(report, params.temperature, lambda request: blocks)

    llm.engine.add_observer(observe)
    try:
        conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
        rounds = max(len(prompt.turns) for prompt in prompts)
        for turn in range(rounds):
            asked = [index for index, prompt in enumerate(prompts) if turn < len(prompt.turns)]
            questions: list[Any] = []
            for index in asked:
                prompt, messages = prompts[index], conversations[index]
                messages.append({"role": "user", "content": prompt.turns[turn]})
                chats = prompt.chat and getattr(llm.tokenizer, "chat_template", None)
                questions.append(chat_tokens(llm.tokenizer, messages) if chats else prompt.turns[turn])
            done = 0
            for first in range(0, len(asked), size := 4 * llm.engine.config.max_num_seqs):
                some = slice(first, first + size)
                for index, output in zip(
                    asked[some], llm.generate(questions[some], params, progress=False), strict=True
                ):
                    conversations[index].append({"role": "assistant", "content": output.text})
                    start = len(output.prompt_token_ids)
                    texts.append(Text((*output.prompt_token_ids, *output.token_ids), start, params.temperature))
                    done += 1
                share = (turn + done / len(asked)) / rounds
                progress.update(
                    span[0] + (span[1] - span[0]) * share, f"{len(texts)} texts, {len(blocks.accepted)} blocks"
                )
    finally:
        llm.engine.remove_observer(observe)
    if not blocks.accepted:
        raise CalibrationError("no block was drafted: give longer or more prompts, or raise --max-tokens")
    return blocks, texts
