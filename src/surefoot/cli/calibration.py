"""`surefoot calibrate`: which drafter, where its calibration goes, and what the target writes for it to be judged by."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from surefoot.bench.prompts import BenchPrompt, chat_tokens
from surefoot.drafters.checkpoint import describe_checkpoint, resolve_checkpoint
from surefoot.drafters.config import fit_problems
from surefoot.drafters.locations import calibration_destination, find_calibration, is_shipped, shipped_drafters
from surefoot.engine.options import COMBINED_PREFIX
from surefoot.errors import CalibrationError, DrafterError, SurefootError
from surefoot.sampling import SamplingParams
from surefoot.speculation.calibration import Calibration
from surefoot.training.forced import WrittenText
from surefoot.training.progress import StageProgress

if TYPE_CHECKING:
    from surefoot.llm import LLM

KEPT_FROM = 2
"""A calibration made from so many times the blocks of a new one is not replaced by it."""


@dataclass(frozen=True)
class Subject:
    """The drafter to be calibrated, and where its calibration goes."""

    checkpoint: Path
    gamma: int
    destination: Path
    previous: Calibration | None  # what a start would use so far, or what stands at the destination


def choose_subject(
    drafter: str, model: str, gamma: int | None, output: Path | None, *, trust_remote_code: bool = False
) -> Subject | None:
    """The drafter that a user means, as far as that can be told before a model is loaded.

    Returns:
        None for `auto` with a model whose drafter only its weights can tell.

    Raises:
        CalibrationError, DrafterError: there is nothing to calibrate, it does not fit the model, or nowhere to save.
    """
    if drafter in ("none", "prompt-lookup"):
        raise CalibrationError(
            f"the drafter {drafter} has no confidence head to calibrate, and needs no file: the online estimator learns its "
            "confidences while it serves"
        )
    if drafter == "auto":
        fitting = [shipped for shipped in shipped_drafters() if not _misfits(shipped.path, model, trust_remote_code)]
        if not fitting:
            raise CalibrationError(
                f"no drafter is shipped for {model}, and prompt lookup has no confidence head to calibrate: name a "
                "checkpoint with --drafter"
            )
        return subject_of(fitting[0].path, gamma, output) if len(fitting) == 1 else None
    checkpoint = resolve_checkpoint(drafter.removeprefix(COMBINED_PREFIX))
    if problems := _misfits(checkpoint, model, trust_remote_code):
        raise DrafterError(f"{drafter} does not fit {model}: {'; '.join(problems)}. Use the target it was trained for")
    if output is None and not Path(drafter.removeprefix(COMBINED_PREFIX)).is_dir() and not is_shipped(checkpoint):
        raise CalibrationError(
            f"{drafter} is no local directory to save a calibration in: say where with --output FILE"
        )
    return subject_of(checkpoint, gamma, output)


def subject_of(checkpoint: Path, gamma: int | None, output: Path | None) -> Subject:
    """As `choose_subject`, for the directory of a checkpoint.

    Raises:
        CalibrationError: it has no confidence head, or gamma is more than its block.
    """
    described = describe_checkpoint(checkpoint)
    if not described.config.enable_confidence_head:
        raise CalibrationError(
            f"the drafter {checkpoint} has no confidence head to calibrate, and needs no file: the online estimator learns "
            "its confidences while it serves"
        )
    if gamma is not None and not 1 <= gamma <= described.gamma:
        raise CalibrationError(f"gamma is {gamma}; allowed for this drafter: 1 … {described.gamma}")
    destination = output or calibration_destination(checkpoint)
    file = destination if destination.is_file() else None if output else find_calibration(checkpoint)
    previous = None
    with contextlib.suppress(CalibrationError):  # a damaged one is nothing to keep
        previous = None if file is None else Calibration.load(file, described.gamma if gamma is None else gamma)
    return Subject(checkpoint, described.gamma if gamma is None else gamma, destination, previous)


def check_worth(subject: Subject, blocks: int, at_most: bool = False) -> None:
    """Keep a calibration that was made from far more blocks than the new one.

    Args:
        blocks: of the new one.
        at_most: it is an upper limit of them, known before they are made.

    Raises:
        CalibrationError: says what is kept, and what to do.
    """
    before = 0 if subject.previous is None else subject.previous.provenance.num_samples
    if blocks * KEPT_FROM < before:
        raise CalibrationError(
            f"the calibration in use was made from {before:,} blocks and is kept, this one "
            f"{'would be' if at_most else 'is'} from {'at most ' if at_most else ''}{blocks:,}: give more prompts or "
            "--max-tokens, save it elsewhere with --output FILE, or replace it with --force"
        )


def _misfits(checkpoint: Path, model: str, trust_remote_code: bool) -> list[str]:
    """Why a drafter does not fit a model, by their configurations; empty also where the model's cannot be read yet."""
    from surefoot.targets.loading import describe_target

    try:
        target = describe_target(model, trust_remote_code=trust_remote_code)
    except SurefootError:  # loading says it better
        return []
    shape = SimpleNamespace(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_hidden_layers=target.num_layers
    )
    return fit_problems(describe_checkpoint(checkpoint).config, shape)


def write_texts(
    llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams, progress: StageProgress, span: tuple[float, float]
) -> list[WrittenText]:
    """Answer all prompts, turn by turn: what was written.

    Args:
        params: of every answer.
        span: which part of `progress` this is.
    """
    texts: list[WrittenText] = []
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
                texts.append(WrittenText((*output.prompt_token_ids, *output.token_ids), start, params.temperature))
                done += 1
            share = (turn + done / len(asked)) / rounds
            progress.update(span[0] + (span[1] - span[0]) * share, f"{len(texts)} texts")
    return texts
