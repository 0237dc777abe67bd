"""What the host tells the device about a step, and what the device tells the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.drafters.base import Draft
from surefoot.engine.clock import Laps
from surefoot.engine.distribution import SamplingFlags
from surefoot.engine.logprobs import Logprobs
from surefoot.engine.state import DeviceState, StateUpdates, to_device
from surefoot.speculation.acceptance import Verdict
from surefoot.speculation.planner import Decision


@dataclass(frozen=True)
class WidthPlan:
    """What the planner decided about the drafted requests of a step. Plain numbers, unless `decide` is left to the step."""

    limits: list[int] = field(default_factory=list)  # [D] largest width each request may get
    budget: int = 0  # K; an upper bound of it where `decide` chooses it
    min_width: int = 0  # positions every request verifies before survival decides; as the planner ranks
    widths: list[int] | None = None  # [D] widths that replace the allocation of K
    explored: int = 0  # blocks whose windows stay whole for the sake of learning
    depth: int | None = None  # tokens that a model drafts of each block (None: gamma)
    # Where the host may read: survival [D, gamma], limits [D] -> K and, if it has ranked them already, the widths.
    decide: Callable[[Tensor, Tensor], Decision] | None = None


class PromptRows(NamedTuple):
    """The rows of a prompt chunk whose log-probabilities a request wants."""

    request: int  # index among the requests of the step
    first: int  # position of the first row
    rows: int
    likeliest: int  # tokens wanted beside the prompt's own, at each


@dataclass(frozen=True)
class StepInputs:
    """What the host decided about one step. Requests stand in the order: drafted, other emitting, prompt chunks."""

    slots: list[int]  # [R] state slots
    context_rows: list[int]  # [R] rows before the anchor: a prompt chunk; 0 for a pure decode
    steps: list[int]  # [E] decode steps the request has taken
    num_drafting: int  # D: requests that get a draft
    num_emitting: int  # E: requests that emit tokens this step (D of them drafted)
    plan: WidthPlan = field(default_factory=WidthPlan)
    flags: SamplingFlags = field(default_factory=SamplingFlags)
    updates: StateUpdates = field(default_factory=StateUpdates)
    max_length: int = 0  # an upper bound of the committed lengths
    prompt_logprobs: list[PromptRows] = field(default_factory=list)

    @property
    def prompt_rows(self) -> int:
        """Rows of prompts whose log-probabilities are wanted."""
        return sum(part.rows for part in self.prompt_logprobs)

    @property
    def prompt_likeliest(self) -> int:
        """Likeliest tokens wanted at any of them; -1 without any."""
        return max((part.likeliest for part in self.prompt_logprobs), default=-1)


class StepRequests(NamedTuple):
    """The requests of one step as device data."""

    slots: Tensor  # [R] int64
    context: Tensor  # [R] int64, rows before the anchor
    steps: Tensor  # [E] int64
    limits: Tensor  # [D] int64
    lengths: Tensor  # [R] int64, cached before the step

    @classmethod
    def of(cls, inputs: StepInputs, state: DeviceState) -> StepRequests:
        """In one transfer."""
        count = len(inputs.slots)
        columns = (inputs.slots, inputs.context_rows, inputs.steps, inputs.plan.limits)
        table = [[*column, *[0] * (count - len(column))] for column in columns]
        slots, context, steps, limits = to_device(table, torch.int64, state.device).unbind()
        lengths = state.lengths.index_select(0, slots)
        return cls(slots, context, steps[: inputs.num_emitting], limits[: inputs.num_drafting], lengths)


@dataclass(frozen=True)
class StepOutputs:
    """What a step computed, as device tensors. Of the target pass, two integers per request leave the device (and
    log-probs, where they were asked for)."""

    draft: Draft  # of the first D requests
    widths: Tensor  # [D] int64, drafts that were verified
    verdict: Verdict  # of the E emitting requests
    confidence: Tensor | None = None  # [D, gamma] float32, calibrated
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of the rows in `StepInputs.prompt_logprobs`, one after the other
    sources: tuple[str, ...] = ()  # names that `draft.source` indexes
    rows: int = 0  # rows the target ran, padding included
    replayed: bool | None = None  # whether a captured graph ran them (None: this runner captures none)
    laps: Laps | None = None  # times of the stages, where somebody watches

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> StepOutputs:
        """The same outputs with every tensor changed, those of draft, verdict and log-probs included."""

        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, (Draft, Verdict, Logprobs, StepOutputs)):
                return replace(value, **{part.name: changed(getattr(value, part.name)) for part in fields(value)})
            return value

        result: StepOutputs = changed(self)
        return result
