"""All options that determine a training run; the manifest stores them unchanged."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from surefoot.errors import ConfigurationError

HEADS = ("vanilla", "gated", "rnn", "none")
OPTIMIZERS = ("adamw", "muon")
PRECISIONS = ("auto", "float32", "bfloat16")
STORAGES = ("native", "int8")


@dataclass(frozen=True)
class DrafterShape:
    """Shape of the drafter to train; with `--init` that drafter's shape is used instead."""

    layers: int = 2
    gamma: int = 5
    head: str = "vanilla"  # none: DFlash, without sequential and confidence head
    rank: int = 128
    vocab: int = 16_384  # size of the draft vocabulary; the target's size or more: all of the target's tokens
    hidden_size: int | None = None  # None: the target's width
    inner: int | None = None  # feed-forward width; None: the target's, scaled down for a narrower drafter
    features: tuple[int, ...] = ()  # indices of the target layers it reads; empty: three, evenly spaced
    storage: str = "native"

    def __post_init__(self) -> None:
        _within("layers", self.layers, 1, 5)
        _within("gamma", self.gamma, 1, 15)
        _within("rank", self.rank, 1, 4096)
        _within("vocab", self.vocab, 2, 1 << 20)
        if self.hidden_size is not None:
            _within("hidden_size", self.hidden_size, 8, 1 << 16)
        if self.inner is not None:
            _within("inner", self.inner, 8, 1 << 18)
        _one_of("head", self.head, HEADS)
        _one_of("storage", self.storage, STORAGES)


@dataclass(frozen=True)
class DataOptions:
    """Training text."""

    sources: tuple[str, ...] = ("builtin",)
    exclude: tuple[str, ...] = ()  # evaluation prompts: prompts that share 13 words in a row with them are dropped
    max_prompts: int = 20_000
    own_prompts: int = 8_000  # attempts of the source `self` (prompts written by the target)
    held_out: float = 0.03  # share of the prompts kept for validation and calibration
    temperatures: tuple[float, ...] = (0.0, 1.0)  # of the regenerated text, in turn
    max_prompt: int = 256  # tokens; longer prompts keep their end
    max_new: int = 192  # tokens regenerated per prompt
    read_tokens: int = 0  # tokens of existing text used without generation
    batch: int = 64  # requests the engine runs at once
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_prompts", 2),
            ("own_prompts", 2),
            ("max_prompt", 1),
            ("max_new", 1),
            ("read_tokens", 0),
            ("batch", 1),
        ):
            _within(name, getattr(self, name), low, 1 << 40)
        if not 0 < self.held_out < 1:
            raise ConfigurationError(f"held_out is {self.held_out}; allowed: a share between 0 and 1")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ConfigurationError(f"temperatures are {self.temperatures}; allowed: at least one, 0 or more")


@dataclass(frozen=True)
class TrainingOptions:
    """Optimisation. A batch is `batch_rows` rows of `row_tokens` packed tokens with `row_anchors` blocks each."""

    lr: float = 6e-4
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    warmup: float = 0.03  # share of the anchors
    clip: float = 1.0  # largest gradient norm
    position_decay: float = 4.0  # weight of block position k: exp(-(k - 1) / position_decay)
    row_tokens: int = 512
    row_anchors: int = 192
    batch_rows: int = 4
    accumulate: int = 1  # micro-batches per step
    reuse: int = 4  # uses of a row per target pass, each with new anchors
    held_batches: int = (
        8  # batches in memory with features and labels (32 KiB of labels per token with 16k draft tokens)
    )
    average: float = 0.0  # decay of the running average of the weights; 0: none
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("row_tokens", "row_anchors", "batch_rows", "accumulate", "reuse", "held_batches"):
            _within(name, getattr(self, name), 1, 1 << 30)
        if self.batch_rows % self.accumulate:
            raise ConfigurationError(
                f"batch_rows {self.batch_rows} cannot be split into {self.accumulate} equal micro-batches: "
                "make it a multiple of accumulate"
            )
        if self.held_batches < self.reuse:
            raise ConfigurationError(
                f"held_batches {self.held_batches} is less than reuse {self.reuse}: every use of a batch needs it held"
            )
        if not 0 <= self.average < 1:
            raise ConfigurationError(f"average is {self.average}; allowed: a decay from 0 (off) to below 1")
        for name in ("lr", "position_decay", "clip"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; allowed: more than 0")
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("precision", self.precision, PRECISIONS)


@dataclass(frozen=True)
class Budget:
    """When to stop: `minutes` for the whole command, or a number of anchors. May change when a run is resumed."""

    minutes: float | None = None
    anchors: int | None = None

    def __post_init__(self) -> None:
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigurationError(f"minutes is {self.minutes}; allowed: more than 0")
        if self.anchors is not None and self.anchors < 1:
            raise ConfigurationError(f"anchors is {self.anchors}; allowed: 1 or more")


def as_dict(options: Any) -> dict[str, Any]:
    """Options as a dictionary ready for JSON; tuples become lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}


def require_same(what: str, stored: dict[str, Any], given: Any) -> None:
    """Raise `ConfigurationError` naming the first field in which a run differs from the one it would resume."""
    wanted = as_dict(given)
    for field in fields(given):
        if stored.get(field.name) != wanted[field.name]:
            raise ConfigurationError(
                f"{what} began with {field.name}={stored.get(field.name)!r}, now it is {wanted[field.name]!r}: "
                "give the same option, or another --output"
            )


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigurationError(f"{name} is {value}; allowed: {low} … {high}")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}; allowed: {', '.join(allowed)}")
