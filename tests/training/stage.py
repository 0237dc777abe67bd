"""A tiny target with text of its own, for every stage of training in seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from surefoot.drafters.model import DSparkModel
from surefoot.targets.target import Target
from surefoot.training.corpus import Corpus, Document
from surefoot.training.features import TrainingVocabulary, choose_vocabulary
from surefoot.training.initial import draft_config, initial_model, read_traits
from surefoot.training.options import DrafterShape, TrainingOptions
from surefoot.training.progress import StageProgress
from surefoot.training.trainer import Trainer
from tests.tiny_models import tiny_target

SHAPE = DrafterShape(layers=1, gamma=3, rank=4, vocab=50)


def silent() -> StageProgress:
    return StageProgress("test", enabled=False)


def some_text(target: Target, count: int, seed: int = 0, longest: int = 40) -> Corpus:
    """Random prompts with random continuations."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, longest, count)
    return Corpus(
        Document(i, int(rng.integers(1, 5)), rng.integers(0, target.vocab_size, length))
        for i, length in enumerate(lengths)
    )


def options(**changes: Any) -> TrainingOptions:
    settings: dict[str, Any] = {
        "row_tokens": 48, "row_anchors": 8, "batch_rows": 2, "held_batches": 4, "reuse": 2, "lr": 3e-3, "precision": "float32",
    }  # fmt: skip
    return TrainingOptions(**{**settings, **changes})


def drafter_model(
    target: Target, vocabulary: TrainingVocabulary, shape: DrafterShape = SHAPE, seed: int = 0
) -> DSparkModel:
    traits = read_traits(target, shape.layers)
    return initial_model(target, traits, draft_config(target, traits, shape, vocabulary, 0), vocabulary, seed)


def trainer(
    architecture: str = "llama",
    shape: DrafterShape = SHAPE,
    documents: int = 16,
    label_dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Trainer:
    """A trainer over a tiny target and random text."""
    target = tiny_target(architecture)
    corpus, held_out = some_text(target, documents), some_text(target, 4, seed=1)
    vocabulary, _ = choose_vocabulary(corpus, held_out, target.vocab_size, shape.vocab)
    model = drafter_model(target, vocabulary, shape)
    return Trainer(target, model, vocabulary, corpus, held_out, options(**changes), label_dtype=label_dtype)
