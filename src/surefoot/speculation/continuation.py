"""Expected survival of later positions, given one position and its survival; learned from past steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
BINS = 32


class ContinuationModel:
    """E[S_j | S_k] for j > k, by position k and by bins of the mean confidence S_k^(1/k) so far.

    Survivals of past blocks are known at every position, verified or not, so the model learns without censoring. Its
    prior is a block that stays as confident as it was so far: S_j = S_k g^(j-k) with g = S_k^(1/k).

    Args:
        gamma: block length.
        memory: blocks after which an observation has half its weight.
        prior_weight: number of observations that the prior counts as, per bin.
        batch: blocks that are learned at a time.

    Attributes:
        edges: [gamma, BINS - 1] survivals at which the next bin begins, by position k.
        ratio: [gamma, BINS, gamma] E[S_j / S_k] by k, bin and j; replaced, never changed in place.
    """

    def __init__(self, gamma: int, memory: int = 4096, prior_weight: float = 4.0, batch: int = 64) -> None:
        self.gamma, self.memory, self.prior_weight, self.batch = gamma, memory, prior_weight, batch
        position = np.arange(gamma)
        centre = _confidence_at((np.arange(BINS) + 0.5) / BINS)
        self.edges = _confidence_at(np.arange(1, BINS) / BINS) ** (position[:, None] + 1)
        self._prior = centre[None, :, None] ** np.maximum(position[None, None, :] - position[:, None, None], 0)
        self._count = np.zeros((gamma, BINS, gamma))
        self._sum = np.zeros((gamma, BINS, gamma))  # of S_j / S_k
        self.ratio = self._prior.copy()
        self._waiting: list[tuple[npt.NDArray[np.floating], npt.NDArray[np.int64]]] = []
        self._count_waiting = 0

    def observe(
        self, survival: npt.NDArray[np.floating], lengths: npt.NDArray[np.int64] | Sequence[int] | None = None
    ) -> None:
        """Take the survivals of past blocks; they count once `batch` blocks are collected.

        Of a large step only an even sample of the requests is taken, at most about `batch` of them.

        Args:
            survival: [N, gamma].
            lengths: [N] positions that were drafted (None: gamma); later ones are ignored.
        """
        every = slice(None, None, max(1, 2 * len(survival) // self.batch))
        drafted = np.full(len(survival), self.gamma) if lengths is None else np.asarray(lengths)
        self._waiting.append((survival[every].copy(), drafted[every]))
        self._count_waiting += len(drafted[every])
        if self._count_waiting >= self.batch:
            rows, drafted = (np.concatenate(parts) for parts in zip(*self._waiting, strict=True))
            self._learn(rows.astype(np.float64), drafted)
            self._waiting.clear()
            self._count_waiting = 0

    def _learn(self, survival: Floats, lengths: npt.NDArray[np.int64]) -> None:
        keep = 0.5 ** (len(survival) / self.memory)
        self._count *= keep
        self._sum *= keep
        position = np.arange(self.gamma)
        shape = self._count.shape
        cell = (position * BINS + self._bin(position, survival))[:, :, None] * self.gamma + position  # [N, k, j]
        known = (position[:, None] <= position) & (position < lengths[:, None, None])
        ratio = np.where(known, survival[:, None] / np.maximum(survival, 1e-30)[:, :, None], 0.0)
        self._count += np.bincount(cell.ravel(), known.ravel(), self._count.size).reshape(shape)
        self._sum += np.bincount(cell.ravel(), ratio.ravel(), self._count.size).reshape(shape)
        self.ratio = (self._sum + self.prior_weight * self._prior) / (self._count + self.prior_weight)

    def expect(self, position: npt.NDArray[np.int64], survival: npt.NDArray[np.floating]) -> Floats:
        """Expected survivals given S at one position each.

        Args:
            position: [N] int64, 0 ... gamma - 1, the position whose survival is known.
            survival: [N] that survival.

        Returns:
            [N, gamma] float64; columns before `position` are meaningless, the one at it is `survival` itself.
        """
        return survival[:, None] * self.ratio[position, self._bin(position, survival)]

    def _bin(self, position: npt.NDArray[np.int64], survival: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
        return (survival[..., None] >= self.edges[position]).sum(-1)


def _confidence_at(share: Floats) -> Floats:
    """Monotone map of [0, 1] to [0, 1] with fine steps near 1, where most confidences of an easy text are."""
    return 1.0 - (1.0 - share) ** 2
