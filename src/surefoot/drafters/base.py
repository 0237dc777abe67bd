"""What a drafter is: something that proposes gamma tokens after an anchor and says what it drew them from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from surefoot.errors import CalibrationError, DrafterError
from surefoot.speculation.calibration import Calibration
from surefoot.speculation.estimator import (
    ConfidenceSource,
    Evidence,
    HeadConfidence,
    LogisticEstimator,
    SignalConfidence,
)

if TYPE_CHECKING:
    from surefoot.cache.flat_batch import FlatBatch
    from surefoot.cache.paged import LayerSpec, PagedCache
    from surefoot.speculation.live_cost import LiveCost
    from surefoot.targets.target import Target


class DraftSampler(Protocol):
    """Draws the block left to right; given to the drafter by the engine so that q gets the processing that p gets."""

    def temperatures(self) -> Tensor | None:
        """[R] float32, the sampling temperature of each request; None where all are 0."""
        ...

    def draw(self, k: int, logits: Tensor, sharpness: Tensor | None = None) -> Tensor:
        """Draw x_k from the processed softmax of `logits` and remember that distribution as q_k.

        Args:
            k: position in the block, 1 ... gamma; calls come in order.
            logits: [R, V_draft] float32 corrected draft logits given the context and x_<k. Column j is the token
                `vocabulary[j]` of the target (identity without a reduced vocabulary).
            sharpness: [] float32 > 0; the draw is made at the request's temperature divided by it (None: 1). q_k is what
                was really drawn from, so that any value is exact.

        Returns:
            [R] int64 drafted tokens as *target* ids.
        """
        ...

    def only(self, rows: Tensor) -> None:
        """Draw for these requests alone ([N] int64, ascending), before the first `draw`; then R is N."""
        ...


@dataclass(frozen=True)
class BlockDraw:
    """How all tokens of a block are drawn, one row a request; stages that are None are off for every request."""

    temperature: Tensor | None = None  # [R] float32; None: every request takes its largest logit
    uniforms: Tensor | None = None  # [R, gamma] float64 in [0, 1), with `temperature`
    top_k: Tensor | None = None  # [R] int64, 0 = off
    top_p: Tensor | None = None  # [R] float32, 1 = off
    min_p: Tensor | None = None  # [R] float32, 0 = off


@runtime_checkable
class BlockwiseSampler(DraftSampler, Protocol):
    """A sampler that can hand over the drawing of a whole block, instead of being asked token by token."""

    def block_draw(self) -> BlockDraw | None:
        """What to draw with; None where the processing of x_k looks at x_<k (penalties), or otherwise wants `draw`."""
        ...

    def take(self, draft_ids: Tensor, probs: Tensor | None) -> Tensor:
        """Remember what was drawn as if by `draw`.

        Args:
            draft_ids: [R, gamma] int64, drawn columns.
            probs: [R, gamma, V_draft] float32, the distributions they were drawn from; None without a temperature.

        Returns:
            [R, gamma] int64 drafted tokens as target ids.
        """
        ...


@dataclass(frozen=True)
class Prediction:
    """A text that a request is likely to repeat, given by its client."""

    tokens: Tensor  # [P] int64
    prompt_len: int  # the request's output begins there


@dataclass(frozen=True)
class DraftContext:
    """The requests a draft pass works on. All tensors live on the engine's device."""

    slots: Tensor  # [R] int64, state slot of each request
    lengths: Tensor  # [R] int64, cached context length; the anchor is the token at this position
    history: Tensor  # [S, L] int64, token history of every slot; history[s, :length + 1] is committed
    cache: PagedCache | None
    max_length: int  # an upper bound of lengths, known on the host
    depth: int | None = None  # most tokens wanted of a block; a model may then run a shorter one (None: gamma)
    predictions: Mapping[int, Prediction] = field(default_factory=dict)  # by slot, of the requests that bring one


@dataclass(frozen=True)
class Draft:
    """gamma drafted tokens per request."""

    tokens: Tensor  # [R, gamma] int64 target ids
    lengths: Tensor | None = None  # [R] int64, tokens really proposed (None: gamma everywhere)
    confidence_logits: Tensor | None = None  # [R, gamma] float32, raw logits of the confidence head (None: no head)
    # [R, gamma] float32 that tells how sure the draft is: log-odds of the likeliest token, or the match length
    signal: Tensor | None = None
    temperature: Tensor | None = None  # [R] float32 sampling temperatures, filled in by the engine (None: all 0)
    point_mass: bool = False  # q is 1 on `tokens`; the sampler was not used
    # Of a drafter that has several sources (`combined.py`). Its logits and signal are the model's: NaN in the rows of blocks
    # that another source drafted, None where the model did not run.
    match: Tensor | None = None  # [R] int64, match length that prompt lookup found, 0: none
    source: Tensor | None = None  # [R] int64, which one proposed this block; -1: nothing was proposed
    drawn: Tensor | None = None  # [R] int64, the sampler's row of this block; -1: a point mass (None: all, in order)
    model_rows: int | None = None  # requests the model's pass ran for (None: all)

    @property
    def evidence(self) -> Evidence:
        """What the confidences of these blocks are read from."""
        return Evidence(self.confidence_logits, self.signal, self.temperature, self.match)


class Drafter:
    """Everything the engine asks of a drafter.

    A class derived from this one inherits the defaults below and has to define `name`, `gamma` and `propose` alone: a drafter
    without a model of its own, whose confidences are estimated from its `signal`, or from its confidence head if it says that
    it has one. `propose` may read x_<k when it scores position k, never x_k.
    """

    name: str
    gamma: int  # draft tokens per block
    block_slots: int = (
        0  # cache slots from the anchor on that `propose` writes; the frontier is at least this (0: none)
    )
    feature_layers: tuple[int, ...] = ()  # target layers whose hidden states it reads; -1 is the embedding output
    cache_layers: tuple[LayerSpec, ...] = ()  # its own context layers, in the target's full-attention blocks
    vocabulary: Tensor | None = None  # [V_draft] int64, draft id -> target id (None: the target's own vocabulary)
    has_confidence_head: bool = False  # whether its drafts carry `confidence_logits`
    sources: tuple[str, ...] = ()  # what the indices in `Draft.source` stand for; empty for a single source
    model_gamma: int | None = None  # draft tokens of a whole block of its model (None: it has no model)
    rests: bool = False  # it decides for itself when its model does not pay and need not run

    @property
    def identity(self) -> Mapping[str, Any]:
        """Plain data that tells drafters of the same name and gamma apart, as far as a draft's cost depends on it."""
        return {}

    def bind(self, target: Target) -> None:
        """Check the fit and share the target's embedding and head.

        Raises:
            DrafterError: it does not fit; the message names both sides.
        """

    def pack(self) -> None:
        """Bring the weights into the form that serves fastest here. Afterwards they can be neither trained nor saved."""

    def use_costs(self, costs: LiveCost) -> None:
        """Make decisions of its own by these costs, which follow the engine's measurements from now on."""

    def confidence_source(self, device: torch.device | str, calibration: str | Path | None = None) -> ConfidenceSource:
        """What reads confidences from its drafts.

        Args:
            device: where the confidences are computed.
            calibration: a file written by `surefoot calibrate`; None: the drafter's own, if it has one.

        Raises:
            CalibrationError: the file cannot be read or was made for another gamma, or there is nothing to calibrate.
        """
        estimator = LogisticEstimator(self.gamma, device)
        if self.has_confidence_head:
            fitted = Calibration.identity(self.gamma, device)
            return HeadConfidence(
                fitted if calibration is None else Calibration.load(calibration, self.gamma, device), estimator
            )
        if calibration is not None:
            raise CalibrationError(
                f"{calibration}: the drafter {self.name} has no confidence head to calibrate; leave the calibration out"
            )
        return SignalConfidence(estimator)

    def extend(self, features: Tensor, batch: FlatBatch, cache: PagedCache) -> None:
        """Project the target's hidden states of the rows just run into the drafter's own context cache.

        Every row is written, also those acceptance will reject: a rejected row lies after the committed length, where
        nobody reads and the next step overwrites. So this call need not wait for the acceptance result.

        Args:
            features: [T, len(feature_layers) * hidden], hidden states in the order of `feature_layers`.
        """

    def propose(self, context: DraftContext, sampler: DraftSampler) -> Draft:
        """Draft gamma tokens (fewer where `Draft.lengths` says so) after each anchor."""
        raise NotImplementedError

    def draft_always(self, always: bool) -> None:
        """For measuring what a draft costs: while `always`, the model drafts for every request, whatever pays."""

    def separate(self) -> Drafter:
        """The same drafter for another engine: weights are shared, what it learns while it serves is not."""
        return self


def check_protocol(drafter: Drafter) -> None:
    """Make sure that an object given as a drafter can be asked everything the engine asks.

    Raises:
        DrafterError: names what is missing, and the remedy.
    """
    asked = {name for name in (*Drafter.__annotations__, *vars(Drafter)) if not name.startswith("_")}
    if missing := sorted(name for name in asked if not hasattr(drafter, name)):
        raise DrafterError(
            f"the drafter {type(drafter).__name__} lacks {', '.join(missing)}: derive its class from "
            "surefoot.drafters.Drafter, which has defaults for all but name, gamma and propose"
        )
