"""Every option of an engine: one frozen object, checked once, when it is made.

`surefoot.LLM(model, **options)` and the command line build it; loading, assembly and the engine read it.
"""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args

import torch

from surefoot.drafters.base import Drafter
from surefoot.drafters.locations import shipped_drafters, shipped_named
from surefoot.engine.graphs import GraphMode
from surefoot.engine.policy import PlannerName
from surefoot.errors import ConfigurationError, DrafterError
from surefoot.kernels import formats
from surefoot.speculation.cost import CostTable
from surefoot.speculation.planner import ForcedWidths
from surefoot.validation import LARGEST_INT32, LARGEST_INT64, choice, flag, integer, number, shown

LOOKUP_NAMES = ("auto", "prompt-lookup")
DRAFTER_NAMES = (*LOOKUP_NAMES, "none")
COMBINED_PREFIX = "prompt-lookup+"
"""Before a checkpoint: prompt lookup and that drafter in one."""
LONGEST_LOOKUP = 32
LARGEST_BATCH, LARGEST_STEP, LARGEST_BLOCK = 4096, 1 << 20, 1024


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine; a wrong value raises `ConfigurationError` (`DrafterError` for a drafter that does not exist).

    Args:
        drafter: `auto` (the one shipped for this target and prompt lookup in one; prompt lookup alone where none is), `none`,
            `prompt-lookup`, a checkpoint, `prompt-lookup+CHECKPOINT` (both in one), or a `Drafter`.
        gamma: drafts per block; None takes what the drafter was trained for.
        width: how many drafts are verified: None or `auto` lets the planner decide, a number fixes it, a pattern such as
            `"0,3,1"` rotates through widths step by step.
        device: `cpu`, `cuda`, `cuda:1` ...; None takes CUDA where there is one.
        dtype: of the target: `bfloat16`, `float16`, `float32` or a `torch.dtype`; None takes the checkpoint's own.
        trust_remote_code: run Python code that the target's checkpoint brings; without it, none runs and nobody is asked.
        quantize: `int8` stores the target's weights in 8 bits; the output is then exact for that quantised target.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: rows of one step.
        max_model_len: longest prompt + answer; None takes what the target can, at most 8192.
        block_size: positions per cache block.
        num_blocks: cache blocks; None lets every request reach `max_model_len`, as far as `cache_bytes` allows.
        cache_bytes: most bytes that the cache takes where `num_blocks` is None; one request of full length always fits.
        cost_table: `auto` finds the table `surefoot profile` saved for this engine, `none` goes without, a path or a
            `CostTable` is taken as given.
        calibration: a file written by `surefoot calibrate`; None takes the one beside the drafter, if any.
        threads: CPU threads, at most the machine's cores; None takes the physical cores.
        seed: seeds the requests that bring none; None draws a fresh one.
        trace: write every step as a line of JSON to this file; `surefoot simulate` replays it.
        planner: `stopping`, `causal` or `stale` (docs/planning.md); None takes the first on a CPU, the last on CUDA.
        min_width, max_width: bounds of every request's width; None is gamma.
        min_gain: least relative gain in tokens per ms for which the stale planner trims.
        breaker: acceptance, up to 1, below which a request rests from speculation (0.6 is a good value); None leaves the
            breaker out.
        guard: compare a few target-only steps with the others, and switch speculation off at loads where it does not pay.
        prefix_reuse: share cached blocks between requests with the same beginning.
        graphs: `auto` (CUDA graphs on CUDA, eager on a CPU), `eager`, or on a CPU `compiled`.
        overlap: prepare a step while the one before it runs; None does so where the device allows it.
        check_layout: verify the layout of every step's flat batch; slow, for tests.
    """

    drafter: str | Path | Drafter | None = "auto"
    gamma: int | None = None
    width: int | str | None = None
    device: str | None = None
    dtype: str | torch.dtype | None = None
    trust_remote_code: bool = False
    quantize: str | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    cache_bytes: int = 1 << 30
    cost_table: str | Path | CostTable = "auto"
    calibration: str | Path | None = None
    threads: int | None = None
    seed: int | None = None
    trace: str | Path | None = None
    planner: PlannerName | None = None
    min_width: int = 0
    max_width: int | None = None
    min_gain: float = 0.0
    breaker: float | None = None
    guard: bool = True
    prefix_reuse: bool = True
    graphs: GraphMode = "auto"
    overlap: bool | None = None
    check_layout: bool = False

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_planning()
        self._check_machine()
        check_drafter(self.drafter, self.gamma)
        for name in ("cost_table", "calibration", "trace"):
            value = getattr(self, name)
            path = isinstance(value, Path) or (isinstance(value, str) and value != "")
            if not (
                path
                or (name == "cost_table" and isinstance(value, CostTable))
                or (name != "cost_table" and value is None)
            ):
                raise ConfigurationError(
                    f"{name} is {shown(value)}; allowed: the path of a file; leave it out for the default"
                )
        if self.trace is not None and not Path(self.trace).parent.is_dir():
            raise ConfigurationError(
                f"trace is {shown(str(self.trace))}: there is no directory {Path(self.trace).parent}"
            )

    def _check_sizes(self) -> None:
        self._integer("max_num_seqs", 1, LARGEST_BATCH, "16 is the default")
        self._integer("max_num_batched_tokens", 1, LARGEST_STEP, "512 is the default")
        self._integer("max_model_len", 2, LARGEST_INT32, "leave it out for what the target can", optional=True)
        self._integer("block_size", 1, LARGEST_BLOCK, "16 is the default")
        self._integer("num_blocks", 2, LARGEST_INT32, "leave it out to let cache_bytes decide", optional=True)
        self._integer("cache_bytes", 1, LARGEST_INT64, "1073741824 is the default")

    def _check_planning(self) -> None:
        self._integer(
            "gamma",
            1,
            LARGEST_BATCH,
            "leave it out for the drafter's own; 'none' is a drafter",
            optional=True,
        )
        self._put("width", _width(self.width))
        self._integer("min_width", 0, LARGEST_BATCH, "0 is the default")
        self._integer("max_width", self.min_width, LARGEST_BATCH, "leave it out for gamma", optional=True)
        self._put("min_gain", number("min_gain", self.min_gain, ConfigurationError, low=0.0, remedy="0 is the default"))
        if self.breaker is not None:
            remedy = "an acceptance such as 0.6, or leave it out"
            checked = number(
                "breaker", self.breaker, ConfigurationError, low=0.0, high=1.0, open_low=True, remedy=remedy
            )
            self._put("breaker", checked)
        if self.planner is not None:
            choice(
                "planner",
                self.planner,
                get_args(PlannerName),
                ConfigurationError,
                remedy="leave it out for the device's",
            )

    def _check_machine(self) -> None:
        if self.device is not None:
            self._put("device", str(_device(self.device)))
        if self.dtype is not None and not isinstance(self.dtype, (str, torch.dtype)):
            raise ConfigurationError(f"dtype is {shown(self.dtype)}; allowed: bfloat16, float16, float32; leave it out")
        if self.quantize is not None:
            choice(
                "quantize",
                self.quantize,
                formats.names(),
                ConfigurationError,
                remedy="leave it out for the weights as they are",
            )
        self._integer("threads", 1, os.cpu_count() or 1, "leave it out for all physical cores", optional=True)
        self._integer("seed", -(2**63), 2**64 - 1, "leave it out for a fresh one", optional=True)
        choice("graphs", self.graphs, get_args(GraphMode), ConfigurationError, remedy="auto is the default")
        for name in ("trust_remote_code", "guard", "prefix_reuse", "check_layout"):
            self._put(name, flag(name, getattr(self, name), ConfigurationError))
        if self.overlap is not None:
            self._put("overlap", flag("overlap", self.overlap, ConfigurationError))

    def _integer(self, name: str, low: int, high: int, remedy: str, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is not None or not optional:
            self._put(name, integer(name, value, ConfigurationError, low=low, high=high, remedy=remedy))

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else

    @property
    def forced_widths(self) -> ForcedWidths | None:
        """The fixed width or pattern; None where the planner decides."""
        return None if self.width is None else ForcedWidths.parse(self.width)

    @property
    def torch_device(self) -> torch.device:
        """The device asked for, or CUDA where there is one."""
        return _device(self.device)


def _width(value: Any) -> int | str | None:
    """None for the planner's choice, a number, or a pattern of comma-separated numbers."""
    if value is None or value == "auto":
        return None
    parts = value.split(",") if isinstance(value, str) else [value]
    try:
        widths = [int(part) if isinstance(part, str) else part for part in parts]
        checked = [
            integer("width", width, ConfigurationError, low=0, high=LARGEST_BATCH, remedy="") for width in widths
        ]
    except ValueError as problem:  # ConfigurationError is one
        raise ConfigurationError(
            f"width is {shown(value)}; allowed: auto, a number of 0 or more, or a rotating pattern such as 0,3,1; "
            "leave it out to let the planner choose"
        ) from problem
    return checked[0] if len(checked) == 1 else ",".join(map(str, checked))


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        usable = device.type in ("cpu", "cuda") and (device.index or 0) < count
    except (RuntimeError, TypeError):
        usable = False
    if not usable:
        raise ConfigurationError(
            f"device is {shown(name)}, which is not available here; allowed: cpu and, with a GPU, cuda or cuda:N"
        )
    return device


def check_drafter(drafter: str | Path | Drafter | None, gamma: int | None) -> None:
    """Refuse a drafter that can be seen to be wrong without loading a model.

    Raises:
        DrafterError, ConfigurationError: a name that is no drafter; a gamma that cannot be.
    """
    if (drafter is None or drafter == "none") and gamma:
        raise ConfigurationError(f"gamma is {gamma}, but there is no drafter: choose one, or leave gamma out")
    if not isinstance(drafter, (str, Path)):
        if drafter is not None and not hasattr(drafter, "propose"):
            raise DrafterError(f"drafter is {shown(drafter)}; allowed: {_drafters()}, or a Drafter")
        return
    looks_up = drafter in LOOKUP_NAMES or str(drafter).startswith(COMBINED_PREFIX)
    if looks_up and gamma is not None and not 1 <= gamma <= LONGEST_LOOKUP:
        raise ConfigurationError(f"gamma is {gamma}; allowed for prompt lookup: 1 … {LONGEST_LOOKUP}")
    if drafter not in DRAFTER_NAMES:
        checkpoint = str(drafter).removeprefix(COMBINED_PREFIX)
        if not checkpoint or not (os.path.exists(checkpoint) or "/" in checkpoint or shipped_named(checkpoint)):
            raise DrafterError(f"unknown drafter {shown(str(drafter))}: allowed are {_drafters()}")


def _drafters() -> str:
    names = (*DRAFTER_NAMES, *(shipped.name for shipped in shipped_drafters()))
    return (
        f"{', '.join(names)}, a checkpoint directory, a Hugging Face id (owner/name), or {COMBINED_PREFIX}CHECKPOINT "
        "for prompt lookup and a checkpoint in one"
    )


AnyClass = TypeVar("AnyClass")


def takes_engine_options(cls: type[AnyClass]) -> type[AnyClass]:
    """Class decorator: `help(cls)` shows every engine option where the constructor says `**options`."""
    signature = inspect.signature(cls)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(option.name, kind, default=option.default, annotation=option.type)
        for option in fields(EngineOptions)
        if option.name not in signature.parameters
    ]
    cls.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    cls.__doc__ = f"{cls.__doc__}\n{'':4}Options:\n{(EngineOptions.__doc__ or '').partition('Args:' + chr(10))[2]}"
    return cls


class EngineArguments(TypedDict, total=False):
    """The fields of `EngineOptions` as keyword arguments, for type checkers."""

    drafter: str | Path | Drafter | None
    gamma: int | None
    width: int | str | None
    device: str | None
    dtype: str | torch.dtype | None
    trust_remote_code: bool
    quantize: str | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    block_size: int
    num_blocks: int | None
    cache_bytes: int
    cost_table: str | Path | CostTable
    calibration: str | Path | None
    threads: int | None
    seed: int | None
    trace: str | Path | None
    planner: PlannerName | None
    min_width: int
    max_width: int | None
    min_gain: float
    breaker: float | None
    guard: bool
    prefix_reuse: bool
    graphs: GraphMode
    overlap: bool | None
    check_layout: bool
