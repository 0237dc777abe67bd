"""What learning may cost: blocks verified whole before it is known whether that pays."""

from __future__ import annotations


class Exploration:
    """Lets an estimator that is warming up see whole windows, as long as that costs almost nothing.

    A trimmed window hides the labels that could prove the trim wrong, so an estimator learns from whole ones, of a few
    blocks per step. Each such step is charged the time that plain steps would have saved for the same tokens; while more
    than `share` of all time is lost, no block is explored. The loss is thus at most `share` of the time plus one step,
    whatever the drafts are worth, and drafts that pay are explored in every step.

    Args:
        blocks: most explored blocks of a step.
        share: largest share of all time that may be lost.
    """

    def __init__(self, blocks: int = 2, share: float = 0.03) -> None:
        self.blocks, self.share = blocks, share
        self.balance_ms = 0.0  # <= 0: gains do not offset later losses

    @property
    def affordable(self) -> int:
        """Blocks that may be explored in the coming step."""
        return self.blocks if self.balance_ms >= 0 else 0

    def observe(self, step_ms: float, gain_ms: float = 0.0) -> None:
        """Take one step, and its gain over plain steps if blocks were explored in it (a loss is negative)."""
        self.balance_ms = min(0.0, self.balance_ms + gain_ms + self.share * step_ms)
