"""Stage *train*: training loop, checkpoints and validation, in one process or several under `torchrun`."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from surefoot.drafters.dspark import DSparkDrafter
from surefoot.drafters.model import DSparkModel
from surefoot.errors import ConfigurationError
from surefoot.paths import write_whole
from surefoot.targets.target import Target
from surefoot.training.batches import Anchors, Batch, PlannedStep, collate, pick_anchors, plan, step_anchors
from surefoot.training.corpus import Corpus
from surefoot.training.features import PackedRow, TargetReader, TrainingVocabulary
from surefoot.training.initial import head_matrix
from surefoot.training.network import DraftLoss, Measured
from surefoot.training.optimiser import choose_precision, learning_rate, make_optimisers, update_average
from surefoot.training.options import TrainingOptions, as_dict, require_same
from surefoot.training.progress import StageProgress

CHECKPOINT_EVERY_S = 300.0
SETTLED, TIMED = 0.05, 0.15
"""Between these shares of a budget in minutes the speed is measured, which converts the budget to anchors. Earlier steps are
slower: they compile and fill the buffer of batches."""
READ_TOKENS = 8192  # tokens of one target pass on a GPU
VALIDATION_ROWS = 4


@dataclass
class Ranks:
    """This process's rank and the number of ranks."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls) -> Ranks:
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else cls()

    @property
    def first(self) -> bool:
        return self.rank == 0

    @staticmethod
    def leave() -> None:
        """Leave the group of ranks, if there is one; no trainer may be in use.

        Trainers are collected first. A DDP reducer that holds the last reference to the group would destroy it while
        holding Python's lock and wait there for gloo's threads, which may wait for that lock: a deadlock (torch 2.13).
        """
        if dist.is_available() and dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


@dataclass
class TimeByPart:
    """Seconds spent, by activity."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


class Trainer:
    """Trains a model in place; `step` is one optimiser step."""

    def __init__(
        self,
        target: Target,
        model: DSparkModel,
        vocabulary: TrainingVocabulary,
        corpus: Corpus,
        held_out: Corpus,
        options: TrainingOptions,
        *,
        label_dtype: torch.dtype = torch.float16,
    ) -> None:
        """
        Args:
            model: float32, with the full Markov table; bound to `target` here.
            corpus, held_out: text for training and for validation.

        Raises:
            ConfigurationError: no text, or `batch_rows` is not a multiple of ranks and micro-batches.
        """
        self.target, self.vocabulary, self.options = target, vocabulary, options
        self.corpus, self.held_out = corpus.split(options.row_tokens), held_out.split(options.row_tokens)
        self.corpus.require_documents("text")
        self.ranks = Ranks.current()
        if options.batch_rows % (self.ranks.count * options.accumulate):
            raise ConfigurationError(
                f"batch_rows {options.batch_rows} cannot be shared by {self.ranks.count} ranks with {options.accumulate} "
                "micro-batches each: make it a multiple of both"
            )
        model.share(target)
        self.model, self.config = model, model.config
        self.dtype = choose_precision(options.precision, target.device)
        self.compact = vocabulary.compact(target.vocab_size)
        # Rows of the Markov table for tokens that never occur cannot change. They are kept aside, so that the optimiser
        # updates thousands of rows per step instead of the whole vocabulary.
        self.table: Tensor | None = None
        if model.markov_head is not None:
            self.table = model.markov_head.markov_w1.weight.detach().clone()
            small = self.table[vocabulary.seen.to(self.table.device)]
            model.markov_head.markov_w1 = nn.Embedding.from_pretrained(small, freeze=False)
        self.loss: nn.Module = DraftLoss(model, head_matrix(model, target), self.dtype)
        if self.ranks.count > 1:
            self.loss = nn.parallel.DistributedDataParallel(self.loss)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimisers = make_optimisers(model, options)
        self.average = [parameter.detach().clone() for parameter in self.parameters] if options.average else []
        self.reader = TargetReader(
            target, model.config.target_layer_ids, vocabulary.draft, options.row_tokens, label_dtype,
            rows=1 if target.device.type == "cpu" else max(1, READ_TOKENS // options.row_tokens),
        )  # fmt: skip
        self.clock = TimeByPart()
        self.number = self.anchors = 0  # steps and anchors done
        self.total: int | None = None  # anchors of the whole run, once known
        self.elapsed = 0.0  # used share of the minutes, until `total` is known
        self.curve: list[dict[str, Any]] = []
        self._plan = plan(self.corpus.lengths, options)
        self._held: dict[int, list[PackedRow]] = {}  # by batch
        self._validation: list[tuple[Batch, Tensor]] | None = None

    # -- one step ----------------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Train on the next batch of the plan; returns loss, acceptance and gradient norm."""
        step = next(self._plan)
        anchors = step_anchors(self.corpus, step, self.number, self.config.gamma, self.options)
        total_weight = float(sum(a.weight.sum() for a in anchors))
        mine = range(self.ranks.rank, len(anchors), self.ranks.count)
        with self.clock.on("target"):
            rows = self._rows(step, mine)
        done = self.anchors / self.total if self.total else self.elapsed
        rate = learning_rate(done, self.options)
        parts = self.options.accumulate
        loss = accepted = 0.0
        for part in range(parts):
            chosen = slice(part, None, parts)
            with self.clock.on("batch"):
                batch = self._collate(
                    rows[chosen], [step.rows[i] for i in mine][chosen], [anchors[i] for i in mine][chosen]
                )
            quiet = self.ranks.count > 1 and part < parts - 1
            with self.loss.no_sync() if quiet else contextlib.nullcontext():  # type: ignore[operator]
                with self.clock.on("forward"):
                    value, measured = self.loss(batch)
                    # DDP averages gradients over ranks, and each rank sees only its share of the weights.
                    value = value * (self.ranks.count / total_weight)
                with self.clock.on("backward"):
                    value.backward()
            loss += float(value.detach()) / self.ranks.count
            accepted += float((measured.acceptance * batch.weight).sum()) / total_weight
        with self.clock.on("optimiser"):
            norm = float(nn.utils.clip_grad_norm_(self.parameters, self.options.clip))
            for optimiser in self.optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = rate
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            if self.average:
                update_average(self.average, self.parameters, self.options.average, self.number)
        self.number += 1
        self.anchors += sum(a.count for a in anchors)
        return {"loss": loss, "acceptance": accepted, "gradient": norm}

    def _rows(self, step: PlannedStep, mine: range) -> list[PackedRow]:
        """This rank's rows of the batch, read at their first use and kept until their last."""
        held = self._held
        for batch in [batch for batch in held if batch < step.oldest]:
            del held[batch]
        if step.batch not in held:
            documents = self.corpus.documents
            held[step.batch] = self.reader.read([[documents[i] for i in step.rows[row]] for row in mine])
        return held[step.batch]

    def _collate(
        self, rows: list[PackedRow], numbers: list[list[int]], anchors: list[Anchors], corpus: Corpus | None = None
    ) -> Batch:
        documents = (corpus or self.corpus).documents
        return collate(rows, [[documents[i].start for i in row] for row in numbers], anchors, self.compact)

    # -- the run -----------------------------------------------------------------------------------------------------------

    def run(self, progress: StageProgress, *, anchors: int | None = None, minutes: float | None = None, state: Path | None = None,
            validate_every: float = 0.1) -> None:  # fmt: skip
        """Train until `anchors` in total, or for about `minutes` (converted to anchors once the speed is known).

        Args:
            state: checkpoint file, written every few minutes and at the end.
            validate_every: share of the run between two validations.
        """
        began, first, saved = time.monotonic(), self.anchors, time.monotonic()
        if anchors is not None:
            self.total = anchors
        budget = 60 * (minutes or 0)
        settled: tuple[int, float] | None = None
        recent: list[dict[str, float]] = []
        marks = int(self.anchors / self.total / validate_every) if self.total else 0
        while self.total is None or self.anchors < self.total:
            recent = [*recent[-19:], self.step()]
            now = time.monotonic()
            if self.total is None:
                self.elapsed = self._agree(int(1e6 * (now - began) / max(budget, 1e-9))) / 1e6
                if settled is None and self.elapsed > SETTLED:
                    settled = (self.anchors, now)
                elif settled is not None and self.elapsed > TIMED:
                    rate = (self.anchors - settled[0]) / max(now - settled[1], 1e-9)
                    self.total = self._agree(self.anchors + int(rate * max(0.0, budget - (now - began))))
            speed = (self.anchors - first) / max(now - began, 1e-9)
            loss, accepted = (sum(entry[key] for entry in recent) / len(recent) for key in ("loss", "acceptance"))
            note = f"{self.anchors} anchors, {speed:.0f}/s, loss {loss:.3f}, acceptance {accepted:.3f}"
            progress.update(self.anchors / self.total if self.total else self.elapsed, note)
            if self.total and self.ranks.first and int(self.anchors / self.total / validate_every) > marks:
                marks = int(self.anchors / self.total / validate_every)
                self.curve.append({"loss": round(loss, 5), **self.validate()})
            if state is not None and self.ranks.first and now - saved > CHECKPOINT_EVERY_S:
                self.save_state(state)
                saved = time.monotonic()
        if state is not None and self.ranks.first:
            self.save_state(state)

    def _agree(self, total: int) -> int:
        """Rank 0's number, on every rank."""
        if self.ranks.count == 1:
            return total
        value = torch.tensor(total, device=self.target.device)
        dist.broadcast(value, 0)
        return int(value)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Teacher-forced acceptance on held-out text at temperatures 1 and 0.

        `length_*` is the mean accepted length plus the bonus token, over blocks of full length; `by_position_*` [gamma] the
        mean acceptance.
        """
        if not len(self.held_out):
            return {"anchors": self.anchors}
        accepted, agrees = [], []
        with self._averaged(), self.clock.on("validation"):
            module = self.loss.module if isinstance(self.loss, nn.parallel.DistributedDataParallel) else self.loss
            for batch, complete in self._validation_batches():
                measured: Measured = module(batch)[1]
                accepted.append(measured.acceptance[complete])
                assert measured.agrees is not None
                agrees.append(measured.agrees[complete].to(torch.float32))
        found: dict[str, Any] = {"anchors": self.anchors}
        for name, values in (("1", torch.cat(accepted)), ("0", torch.cat(agrees))):
            survived = values.cumprod(1)
            found[f"length_{name}"] = round(float(1 + survived.sum(1).mean()), 4)
            found[f"by_position_{name}"] = [round(x, 4) for x in values.mean(0).tolist()]
        return found

    def _validation_batches(self) -> list[tuple[Batch, Tensor]]:
        """Batches of one row, each with a mask [1, A] of the anchors whose block is complete."""
        if self._validation is None:
            self._validation = []
            documents = self.held_out.documents
            step = next(plan(self.held_out.lengths, self.options))
            for numbers in step.rows[:VALIDATION_ROWS]:
                chosen = [documents[i] for i in numbers]
                anchors = pick_anchors(chosen, self.options.row_anchors, self.config.gamma, 1e9, None)
                batch = self._collate(self.reader.read([chosen]), [numbers], [anchors], self.held_out)
                self._validation.append((batch, batch.weight[..., -1] > 0))
        return self._validation

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Use the averaged weights instead of the trained ones."""
        if not self.average:
            yield
            return
        trained = [parameter.data for parameter in self.parameters]
        try:
            for parameter, kept in zip(self.parameters, self.average, strict=True):
                parameter.data = kept
            yield
        finally:
            for parameter, kept in zip(self.parameters, trained, strict=True):
                parameter.data = kept

    # -- results and checkpoints ---------------------------------------------------------------------------------------------

    def drafter(self, dtype: torch.dtype | None = None) -> DSparkDrafter:
        """The drafter as trained so far, with the full Markov table, in the target's dtype by default; not bound to a target."""
        with self._averaged():
            state = {name: tensor.detach().clone() for name, tensor in self.model.own_tensors().items()}
        if self.table is not None:
            table = self.table.clone()
            table[self.vocabulary.seen.to(table.device)] = state["markov_head.markov_w1.weight"]
            state["markov_head.markov_w1.weight"] = table
        model = DSparkModel(self.config, vocabulary=self.vocabulary.draft, own_vocabulary=tuple(_own(state)))
        model.load_state_dict(state)
        return DSparkDrafter(model.to(dtype or self.target.dtype).eval())

    def save_state(self, path: Path) -> None:
        """Write everything the next step depends on, atomically."""
        state = {
            "options": as_dict(self.options),
            "dtype": str(self.dtype),
            "number": self.number,
            "anchors": self.anchors,
            "total": self.total,
            "curve": self.curve,
            "seconds": self.clock.seconds,
            "parameters": [parameter.detach() for parameter in self.parameters],
            "average": self.average,
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        write_whole(path, lambda file: torch.save(state, file))

    def load_state(self, path: Path) -> None:
        """Restore the state of `save_state`; training continues bit for bit.

        Raises:
            ConfigurationError: the file is damaged, or of a run with other options.
        """
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
        except Exception as error:  # torch raises pickle's, zipfile's and its own errors
            raise ConfigurationError(f"{path} cannot be read ({error}): delete it to train from the start") from None
        require_same("training", state["options"], self.options)
        shapes = [tuple(parameter.shape) for parameter in self.parameters]
        if shapes != [tuple(parameter.shape) for parameter in state["parameters"]]:
            raise ConfigurationError(
                f"{path} belongs to a drafter of another shape: give another --output, or delete it"
            )
        with torch.no_grad():
            for parameter, kept in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(kept)
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.average = state["average"]
        self.number, self.anchors, self.total = state["number"], state["anchors"], state["total"]
        self.curve, self.clock.seconds = state["curve"], state["seconds"]
        self.dtype = getattr(torch, state["dtype"].removeprefix("torch."))
        for module in self.loss.modules():
            if isinstance(module, DraftLoss):
                module.dtype = self.dtype
        self._plan = islice(plan(self.corpus.lengths, self.options), self.number, None)


def _own(state: dict[str, Tensor]) -> Iterator[str]:
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" in state:
            yield name
