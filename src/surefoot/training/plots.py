"""Reliability diagrams and acceptance curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.paths import write_whole
from surefoot.speculation.calibration_quality import PositionQuality
from surefoot.training.measure import VerifiedBlocks


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    write_whole(path, lambda file: figure.savefig(file, format="png", dpi=110))


def reliability_plot(arms: Mapping[str, Sequence[PositionQuality]], path: Path) -> None:
    """Observed against predicted survival, one panel per position; dot area is proportional to the number of samples.

    Args:
        arms: "before" and perhaps "after" calibration -> [gamma] qualities.
    """
    gamma = len(next(iter(arms.values())))
    columns = min(gamma, 5)
    rows = -(-gamma // columns)
    figure = _figure(2.6 * columns, 2.9 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for k, panel in enumerate(panels):
        if k >= gamma:
            panel.set_axis_off()
            continue
        panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for arm, qualities in arms.items():
            filled = [b for b in qualities[k].bins if b.count]
            sizes = 60 * np.sqrt(np.array([b.count for b in filled]) / max(qualities[k].count, 1))
            x, y = [b.predicted for b in filled], [b.observed for b in filled]
            panel.plot(x, y, linewidth=1, label=f"{arm}: ECE {qualities[k].ece:.1%}")
            panel.scatter(x, y, s=sizes)
        panel.set_title(f"position {k + 1}", fontsize=9)
        panel.legend(fontsize=7, loc="upper left")
    figure.supxlabel("predicted survival")
    figure.supylabel("accepted")
    _save(figure, path)


def acceptance_plot(groups: Mapping[str, VerifiedBlocks], path: Path) -> None:
    """Conditional acceptance, and the share of blocks accepted that far, by position; one line per workload."""
    figure = _figure(9, 3.8)
    conditional, survived = figure.subplots(1, 2, sharey=True)
    for name, blocks in groups.items():
        rates, _ = blocks.conditional()
        k = np.arange(1, blocks.gamma + 1)
        conditional.plot(k, rates, marker="o", markersize=3, label=name)
        survived.plot(k, np.cumprod(rates), marker="o", markersize=3)
    for panel, title in ((conditional, "accepted, given the position before"), (survived, "accepted up to here")):
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("position in the block")
        panel.set_ylim(0, 1)
        panel.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(fontsize=7, loc="outside right upper")
    _save(figure, path)
