"""The cost table in use, shared by reference by everything that plans or measures.

One engine has one `LiveCost`. Its planners, its drafter's choice of a source and its profile hold this object and read
`table` when they need it, so a new table reaches all of them at once.
"""

from __future__ import annotations

from typing import Any

from surefoot.speculation.cost import CostTable
from surefoot.speculation.drift import Correction, DriftTracker, Rescale


class LiveCost:
    """The current cost table of an engine; it follows measured step times.

    Attributes:
        version: rises with every change of the table. What was computed from an older version is out of date.
        time_scale: rises when all times of the table change together. Tokens per ms that were measured before are in
            another unit then; a correction of single row counts leaves it alone.
    """

    def __init__(self, table: CostTable | None = None) -> None:
        self.version = self.time_scale = 0
        self._table = table
        self._drift = None if table is None else DriftTracker(table)

    @property
    def table(self) -> CostTable | None:
        """The table to plan with; None where nothing has been measured."""
        return self._table

    def describe(self) -> dict[str, Any] | None:
        """The table in use, as JSON data; None without one."""
        if self._table is None:
            return None
        return {
            "steadiness": self._table.steadiness,
            "unsteady": self._table.unsteady,
            "changes": self.version,  # by drift, or by a new measurement
        }

    def use(self, table: CostTable | None) -> None:
        """Replace the table, for instance by one just measured. Drift is tracked anew, relative to it."""
        self._table = table
        self._drift = None if table is None else DriftTracker(table)
        self.version += 1
        self.time_scale += 1

    def observe(self, predicted_ms: float, measured_ms: float, rows: int | None = None) -> Rescale | Correction | None:
        """Compare one step that ran as predicted (no prompt chunk, no compilation) with its measured time.

        Args:
            rows: rows of the target pass (None: unknown; no single row count is corrected by this step).

        Returns:
            The change of `table` that this step completed, or None.
        """
        if self._drift is None:
            return None
        change = self._drift.observe(predicted_ms, measured_ms, rows)
        if change is not None:
            self._table = self._drift.table
            self.version += 1
            self.time_scale += isinstance(change, Rescale)
        return change
