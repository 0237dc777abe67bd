"""`surefoot calibrate`: what the target writes, for a drafter to be judged by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surefoot.bench.prompts import BenchPrompt, chat_tokens
from surefoot.drafters.dspark import DSparkDrafter
from surefoot.errors import CalibrationError
from surefoot.sampling import SamplingParams
from surefoot.training.forced import Text
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
    drafter.draw_by(None)
    return drafter


def write_texts(
    llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams, progress: Progress, span: tuple[float, float]
) -> list[Text]:
    """Answer all prompts, turn by turn: what was written.

    Args:
        params: of every answer.
        span: which part of `progress` this is.
    """
    texts: list[Text] = []
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
        for first in range(0, len(asked), size := llm.engine.options.max_num_seqs):
            some = slice(first, first + size)
            outputs = llm.generate(questions[some], params, progress=False)
            for index, output in zip(asked[some], outputs, strict=True):
                conversations[index].append({"role": "assistant", "content": output.text})
                start = len(output.prompt_token_ids)
                texts.append(Text((*output.prompt_token_ids, *output.token_ids), start, params.temperature))
                done += 1
            share = (turn + done / len(asked)) / rounds
            progress.update(span[0] + (span[1] - span[0]) * share, f"{len(texts)} texts")
    return texts
