"""The stages of `surefoot train`, each resumable, and the manifest of everything that determines the result."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from surefoot.drafters.checkpoint import load_drafter, save_drafter
from surefoot.drafters.layouts import Layout
from surefoot.drafters.model import DSparkModel
from surefoot.drafters.shipped import target_identity
from surefoot.errors import ConfigurationError
from surefoot.paths import write_whole
from surefoot.speculation.json_files import read_object, write_object
from surefoot.targets.target import Target
from surefoot.training.corpus import Corpus, write_shard
from surefoot.training.evaluate import evaluate, load_workloads, prompts_of_rows
from surefoot.training.features import TrainingVocabulary, choose_vocabulary
from surefoot.training.files import Workplace, file_digest, read_lines
from surefoot.training.initial import TargetTraits, draft_config, initial_model, read_traits
from surefoot.training.measure import calibrate, speculation_engine
from surefoot.training.options import Budget, DataOptions, DrafterShape, TrainingOptions, as_dict, require_same
from surefoot.training.progress import StageProgress
from surefoot.training.prompts import SELF, Prompt, collect_prompts
from surefoot.training.regenerate import bulk, bulk_sampler, generation_engine, read_existing, regenerate
from surefoot.training.selfmade import make_up
from surefoot.training.trainer import Ranks, Trainer
from surefoot.version import __version__

STAGES = ("prompts", "regenerate", "features", "train", "calibrate", "evaluate")
REGENERATION_SHARE, MEASURING_SHARE = 0.4, 0.1
"""Shares of a budget in minutes: the maximum for generation, and about what is reserved for the last two stages."""
CALIBRATION_PROMPTS, EVALUATION_PROMPTS = 128, 48


@dataclass(frozen=True)
class TrainingRun:
    """Options of a `surefoot train` command."""

    shape: DrafterShape
    data: DataOptions
    training: TrainingOptions
    budget: Budget
    init: str | None = None
    evaluate_on: str | None = None  # prompts of the last stage; None: held-out prompts
    layout: Layout = "deepspec"


class Pipeline:
    """The stages for one target and one workplace."""

    def __init__(
        self, target: Target, traits: TargetTraits, run: TrainingRun, output: str | Path, *, show: bool = True
    ) -> None:
        """
        Args:
            target: may be packed for serving already.
            traits: `read_traits(target, run.shape.layers)`, taken before packing.
            show: whether to show progress on standard error.
        """
        self.target, self.traits, self.wanted = target, traits, run
        self.place, self.ranks = Workplace(output), Ranks.current()
        self.show = show and self.ranks.first
        self.began = time.monotonic()
        self.record: dict[str, Any] = {}
        if self.place.record.exists():
            self.record = read_object(self.place.record, ConfigurationError)

    # -- order -------------------------------------------------------------------------------------------------------------

    def run(self, stages: Sequence[str] = STAGES) -> dict[str, Any]:
        """Run `stages` in order and return the record of all. If all stages are requested, finished ones are skipped."""
        if unknown := [stage for stage in stages if stage not in STAGES]:
            raise ConfigurationError(f"stage {unknown[0]!r}: allowed are {', '.join(STAGES)}")
        everything = tuple(stages) == STAGES
        for stage in STAGES:
            if stage not in stages or (everything and self._is_done(stage)):
                continue
            started = time.monotonic()
            with StageProgress(stage, self.show) as progress:
                found = getattr(self, f"_{stage}")(progress)
            self._wait()
            if self.ranks.first:
                self.record[stage] = {**found, "seconds": round(time.monotonic() - started, 2), "done": True}
                write_object(self.place.record, self.record)
                if self.place.output.exists():
                    self._write_manifest()
            self._wait()
            if self.ranks.count > 1:
                self.record = read_object(self.place.record, ConfigurationError)
        return self.record

    def _is_done(self, stage: str) -> bool:
        entry = self.record.get(stage, {})
        for what, options in (("data", self.wanted.data), ("shape", self.wanted.shape)):
            if what in entry:
                require_same(f"stage {stage}", entry[what], options)
        if stage == "train" and entry.get("done"):
            wanted = self.wanted.budget.anchors
            return wanted is None or entry["anchors"] >= wanted
        if stage in ("calibrate", "evaluate"):
            return entry.get("weights") is not None and entry["weights"] == self.record.get("train", {}).get("weights")
        return bool(entry.get("done"))

    def _wait(self) -> None:
        if self.ranks.count > 1:
            dist.barrier()

    def _left_s(self, share: float) -> float | None:
        """Seconds until `share` of the minutes is used; None without such a budget."""
        minutes = self.wanted.budget.minutes
        return None if minutes is None else max(1.0, 60 * minutes * share - (time.monotonic() - self.began))

    # -- stages ------------------------------------------------------------------------------------------------------------

    def _prompts(self, progress: StageProgress) -> dict[str, Any]:
        if not self.ranks.first:
            return {}
        data = self.wanted.data
        made_up: Iterable[Prompt] = ()
        if SELF in data.sources:
            if self.target.tokenizer is None:
                raise ConfigurationError(f"{self.target.name} has no tokenizer: prompts cannot come from {SELF!r}")
            made_up = make_up(self.target, data.own_prompts, data.seed, progress, rows=data.batch)
        counts = collect_prompts(self.target, data, self.place, made_up)
        progress.update(1.0, f"{counts['prompts']} prompts, {counts['held_out']} held out")
        return {**counts, "data": as_dict(data)}

    def _regenerate(self, progress: StageProgress) -> dict[str, Any]:
        data, place = self.wanted.data, self.place
        if not place.prompts.exists():
            raise ConfigurationError(f"no prompts in {place.work}: run the stage 'prompts' first, or leave --stage out")
        if self.ranks.first and data.read_tokens:
            documents = list(read_existing(self.target, data, self.wanted.training.row_tokens))
            write_shard(place.read, documents)
        source = bulk_sampler(self.target, data) if bulk(self.target) else generation_engine(self.target, data)
        share = (self.ranks.rank, self.ranks.count)
        # The held-out part is first, so that calibration has its prompts even when the time runs out.
        regenerate(
            source, place.held_out_prompts, place.held_out, data, progress, share=share, deadline=self._deadline(0.5)
        )
        found = regenerate(
            source, place.prompts, place.regenerated, data, progress, share=share, deadline=self._deadline(1.0)
        )
        return {**found, "data": as_dict(data)}

    def _deadline(self, part: float) -> float | None:
        left = self._left_s(REGENERATION_SHARE * part)
        return None if left is None else time.monotonic() + left

    def _corpora(self) -> tuple[Corpus, Corpus]:
        return Corpus.load(self.place.regenerated, self.place.read), Corpus.load(self.place.held_out)

    def _features(self, progress: StageProgress) -> dict[str, Any]:
        if not self.ranks.first:
            return {}
        corpus, held_out = self._corpora()
        corpus.require_documents("text")
        size = self.wanted.shape.vocab
        vocabulary, counts = choose_vocabulary(
            corpus, held_out, self.target.vocab_size, size, sorted(self.target.eos_token_ids)
        )
        data = {"seen": vocabulary.seen}
        if vocabulary.draft is not None:
            data["vocabulary"] = vocabulary.draft
        write_whole(self.place.vocabulary, lambda file: save_file(data, file))
        progress.update(1.0, f"{counts['words']} tokens cover {counts['held_out_coverage']:.2%} of held-out text")
        return {**counts, "held_out_tokens": held_out.num_tokens}

    def _vocabulary(self) -> TrainingVocabulary:
        if not self.place.vocabulary.exists():
            raise ConfigurationError(
                f"no draft vocabulary in {self.place.work}: run the stage 'features' first, or leave --stage out"
            )
        data = load_file(self.place.vocabulary)
        return TrainingVocabulary(data.get("vocabulary"), data["seen"])

    def trainer(self) -> Trainer:
        """The trainer of this run, at its last checkpoint."""
        corpus, held_out = self._corpora()
        vocabulary, run = self._vocabulary(), self.wanted
        if run.init is None:
            config = draft_config(self.target, self.traits, run.shape, vocabulary, mask_token(self.target))
            model = initial_model(self.target, self.traits, config, vocabulary, run.training.seed)
        else:
            model = self._from_drafter(run.init)
            vocabulary = TrainingVocabulary(model.vocabulary, vocabulary.seen)
        trainer = Trainer(self.target, model, vocabulary, corpus, held_out, run.training)
        if self.place.state.exists():
            trainer.load_state(self.place.state)
        return trainer

    def _from_drafter(self, name: str) -> DSparkModel:
        """The weights to fine-tune; the shape options are ignored."""
        drafter = load_drafter(name, dtype=torch.float32, device=self.target.device)
        drafter.bind(self.target)
        drafter.model.requires_grad_(True)
        for module in (drafter.model.embed_tokens, drafter.model.lm_head):
            if module is not None:
                module.requires_grad_(False)
        return drafter.model.train()

    def _train(self, progress: StageProgress) -> dict[str, Any]:
        budget = self.wanted.budget
        trainer = self.trainer()
        left = self._left_s(1 - MEASURING_SHARE)
        if trainer.total is not None and budget.anchors is None and trainer.anchors < trainer.total:
            budget = Budget(anchors=trainer.total)  # a resumed run in minutes goes on to the anchors it had settled on
        before, began = trainer.anchors, time.monotonic()
        trainer.run(
            progress,
            anchors=budget.anchors,
            minutes=None if budget.anchors is not None or left is None else left / 60,
            state=self.place.state,
        )
        seconds = time.monotonic() - began
        if not self.ranks.first:
            return {}
        drafter = trainer.drafter()
        if self.wanted.layout == "speculators":
            drafter.bind(self.target)
        if self.wanted.shape.storage == "int8":
            drafter.model.config = drafter.config = drafter.config.model_copy(update={"weight_storage": "int8"})
        save_drafter(drafter, self.place.output, self.wanted.layout)
        return {
            "anchors": trainer.anchors,
            "steps": trainer.number,
            "anchors_per_s": round((trainer.anchors - before) / max(seconds, 1e-9), 1),
            "precision": str(trainer.dtype).removeprefix("torch."),
            "seconds_by_part": {name: round(value, 2) for name, value in trainer.clock.seconds.items()},
            "curve": trainer.curve,
            "parameters": sum(parameter.numel() for parameter in trainer.parameters),
            "drafter": drafter.config.model_dump(mode="json"),
            "shape": as_dict(self.wanted.shape),
            "weights": file_digest(self.place.output / "model.safetensors"),
        }

    def _calibrate(self, progress: StageProgress) -> dict[str, Any]:
        if not self.ranks.first:
            return {}
        self._require_drafter()
        engine = self._speculation()
        weights = file_digest(self.place.output / "model.safetensors")
        if engine.drafter is None or not engine.drafter.has_confidence_head:
            self.place.calibration.unlink(missing_ok=True)
            return {"weights": weights, "note": "no confidence head: nothing to calibrate"}
        prompts = [row["tokens"] for row in read_lines(self.place.held_out_prompts)[:CALIBRATION_PROMPTS]]
        fitted, found = calibrate(
            engine,
            self.place.output,
            prompts,
            self.wanted.data.temperatures,
            self.wanted.data.max_new,
            progress,
            dataset="held-out prompts",
        )
        fitted.save(self.place.calibration)
        return {**found, "weights": weights}

    def _evaluate(self, progress: StageProgress) -> dict[str, Any]:
        if not self.ranks.first:
            return {}
        self._require_drafter()
        if self.wanted.evaluate_on is not None:
            workloads = load_workloads(Path(self.wanted.evaluate_on))
        else:
            rows = read_lines(self.place.held_out_prompts)
            # The first ones are the calibration's; a small run has no others.
            rows = rows[CALIBRATION_PROMPTS:] or rows
            workloads = prompts_of_rows(rows, EVALUATION_PROMPTS)
        self._write_manifest()
        report = evaluate(
            self.target, self.place.output, workloads, self.place.evaluation, progress,
            max_tokens=min(128, self.wanted.data.max_new), batch=self._at_once(16),
        )  # fmt: skip
        results = {
            name: {t: figures["accepted_length_with_bonus"] for t, figures in temperatures.items()}
            for name, temperatures in report["results"].items()
        }
        return {"accepted_length_with_bonus": results, "weights": file_digest(self.place.output / "model.safetensors")}

    def _speculation(self) -> Any:
        data = self.wanted.data
        return speculation_engine(
            self.target, self.place.output, batch=self._at_once(32), max_model_len=data.max_prompt + data.max_new + 1
        )

    def _at_once(self, on_cpu: int) -> int:
        """Number of concurrent requests while measuring."""
        return min(on_cpu if self.target.device.type == "cpu" else 128, self.wanted.data.batch)

    def _require_drafter(self) -> None:
        if not (self.place.output / "config.json").exists():
            raise ConfigurationError(
                f"no drafter in {self.place.output}: run the stage 'train' first, or leave --stage out"
            )

    # -- the manifest ------------------------------------------------------------------------------------------------------

    def _write_manifest(self) -> None:
        place, run = self.place, self.wanted
        digests = {
            file: sorted(row["digest"] for row in read_lines(file)) if file.exists() else []
            for file in (place.prompts, place.held_out_prompts)
        }
        shards = [*sorted(place.regenerated.glob("*")), *sorted(place.held_out.glob("*")), place.read, place.vocabulary]
        write_object(
            place.manifest,
            {
                "format": "surefoot-training-manifest",
                "version": 1,
                "target": {
                    "name": self.target.name,
                    "weights": self.target.weights,
                    "identity": target_identity(self.target),
                    "dtype": str(self.target.dtype).removeprefix("torch."),
                    "vocab_size": self.target.vocab_size,
                    "hidden_size": self.target.hidden_size,
                    "layers": self.target.num_layers,
                },
                "options": {
                    "shape": as_dict(run.shape),
                    "data": as_dict(run.data),
                    "training": as_dict(run.training),
                    "budget": as_dict(run.budget),
                    "init": run.init,
                },
                "versions": {
                    "surefoot": __version__,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "python": platform.python_version(),
                    "machine": platform.machine(),
                    "threads": torch.get_num_threads(),
                    "ranks": self.ranks.count,
                },
                "data": {
                    str(file.relative_to(place.work)): file_digest(file)
                    for file in (place.prompts, place.held_out_prompts, *shards)
                    if file.exists()
                },
                "stages": self.record,
                "prompt_digests": digests[place.prompts],
                "held_out_digests": digests[place.held_out_prompts],
            },
        )


def mask_token(target: Target) -> int:
    """The token in the block slots after the anchor: one that ordinary text does not contain."""
    tokenizer = target.tokenizer
    for name in ("mask_token_id", "pad_token_id", "unk_token_id"):
        value = getattr(tokenizer, name, None)
        if value is not None:
            return int(value)
    return min(target.eos_token_ids, default=0)


def prepare(
    target: str,
    run: TrainingRun,
    output: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    show: bool = True,
) -> Pipeline:
    """Load a target by name, copy the weights the drafter starts from, and pack the target for serving.

    Under `torchrun` the process joins the group of ranks, and uses the GPU of its local rank if there are GPUs.
    """
    from surefoot.targets.loading import load_target
    from surefoot.targets.optimise import optimise

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if where.startswith("cuda") else "gloo", timeout=datetime.timedelta(hours=12))
        if where == "cuda":
            where = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(where)
    loaded = load_target(target, dtype=dtype, device=where, trust_remote_code=trust_remote_code, quiet=not show)
    traits = read_traits(loaded, run.shape.layers)
    optimise(loaded.model)
    return Pipeline(loaded, traits, run, output, show=show)
