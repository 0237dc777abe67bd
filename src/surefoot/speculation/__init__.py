"""Speculation as a pure library: how sure a draft is, what verifying it costs, and how much of it to verify.

Tensors and dataclasses in, decisions out; no model, and no I/O but its JSON files. A step of an engine uses it like this:

    published = board.read(step, seats)                      # survivals of earlier steps
    decision = planner.decide(published, load)               # K and the reason
    widths = allocate(prefix_survival(confidence), decision.budget, limits)
    ...                                                      # verify, accept
    source.observe(evidence, accepted, widths)               # learn
    board.publish(step, seats, prefix_survival(confidence))  # for later steps
"""

from surefoot.speculation.allocation import allocate
from surefoot.speculation.breaker import Breaker, BreakerState
from surefoot.speculation.calibration import Calibration, Provenance
from surefoot.speculation.calibration_fit import fit_temperatures
from surefoot.speculation.calibration_quality import Outcomes, quality_by_position
from surefoot.speculation.continuation import ContinuationModel
from surefoot.speculation.cost import CostTable
from surefoot.speculation.drift import Correction, DriftTracker, Rescale
from surefoot.speculation.estimator import (
    ConfidenceSource,
    Evidence,
    HeadConfidence,
    LogisticEstimator,
    SignalConfidence,
)
from surefoot.speculation.exploration import Exploration
from surefoot.speculation.live_cost import LiveCost
from surefoot.speculation.planner import (
    CausalPlanner,
    Decision,
    ForcedWidths,
    Planner,
    Reason,
    StalePlanner,
    StepLoad,
)
from surefoot.speculation.sources import CombinedConfidence, SourceChoice
from surefoot.speculation.statistics import BlockRecord, InactiveError, RequestStatistics, Statistics, StepRecord
from surefoot.speculation.stopping import StoppingPlanner
from surefoot.speculation.survival import ConfidenceBoard, PublishedSurvival, Seat, prefix_survival

__all__ = [
    "BlockRecord",
    "Breaker",
    "BreakerState",
    "Calibration",
    "CausalPlanner",
    "CombinedConfidence",
    "ConfidenceBoard",
    "ConfidenceSource",
    "ContinuationModel",
    "Correction",
    "CostTable",
    "Decision",
    "DriftTracker",
    "Evidence",
    "Exploration",
    "ForcedWidths",
    "HeadConfidence",
    "InactiveError",
    "LiveCost",
    "LogisticEstimator",
    "Outcomes",
    "Planner",
    "Provenance",
    "PublishedSurvival",
    "Reason",
    "RequestStatistics",
    "Rescale",
    "Seat",
    "SignalConfidence",
    "SourceChoice",
    "StalePlanner",
    "Statistics",
    "StepLoad",
    "StepRecord",
    "StoppingPlanner",
    "allocate",
    "fit_temperatures",
    "prefix_survival",
    "quality_by_position",
]
