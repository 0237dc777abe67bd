"""What learning may cost: blocks verified whole, though nobody knows yet whether they are worth it."""

from __future__ import annotations


class Exploration:
    """Lets an estimator that is warming up see whole windows, as long as that costs next to nothing.

    A trimmed window hides the labels that could prove the trim wrong, so an estimator learns from whole ones. They are
    granted to a few blocks of a step. Every step in which they were is charged with the time that plain steps would have
    saved for the same tokens; while more than `share` of all time is gone, no block is explored. So the loss is at most
    `share` of the time and one step's, whatever comes of the drafts, and drafts that pay are explored in every step.

    Args:
        blocks: most blocks of a step; with as many requests or fewer, everybody's.
        share: of all time that may be lost.
    """

    def __init__(self, blocks: int = 2, share: float = 0.03) -> None:
        self.blocks, self.share = blocks, share
        self.balance_ms = 0.0  # <= 0: gains are not saved up for losses to come

    @property
    def affordable(self) -> int:
        """Blocks that may be explored in the coming step."""
        return self.blocks if self.balance_ms >= 0 else 0

    def observe(self, step_ms: float, gain_ms: float = 0.0) -> None:
        """Take one step, and what it gained on plain steps if blocks were explored in it (a loss is negative)."""
        self.balance_ms = min(0.0, self.balance_ms + gain_ms + self.share * step_ms)
