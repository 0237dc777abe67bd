"""Running the target on a flat batch: padded token buckets, and one captured callable per bucket.

The key is the padded token count alone, whatever the mix of widths: lengths, slots and widths are data. On CUDA a bucket is a
graph with static buffers; on a CPU it is the eager model with native kernels, or (opt-in) compiled decoder layers.

Padding rows are never mistaken for real ones: `kv_lens` 0, cache slot 0 (the scratch block), and no logit row points at them. A
pass fills every row of its bucket, so nothing of a larger pass before it is left.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from surefoot.cache.flat_batch import FlatBatch
from surefoot.cache.paged import PagedCache
from surefoot.errors import ConfigurationError
from surefoot.kernels.attention import capturable
from surefoot.targets.target import Target, TargetOutput

log = logging.getLogger(__name__)

GraphMode = Literal["auto", "eager", "compiled"]
CAPTURE_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Token counts captured by default: a pass between two of them pays for the larger, so they are dense where rows are dear."""
LARGE_SIZES = (320, 384, 448, 512, 640, 768, 896, 1024)
"""Captured as well where steps may be so large: many requests with full windows, and prompt chunks beside them."""


class TargetRunner(Protocol):
    replayed: bool | None  # whether the last pass replayed a captured graph; None where nothing is ever captured

    def bucket(self, rows: int) -> int:
        """Rows the pass is padded to."""
        ...

    def prepare(self, cache: PagedCache, feature_layers: tuple[int, ...]) -> None:
        """Called once, before the first pass, with what every pass will be given."""
        ...

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput: ...


def runner_for(target: Target, mode: GraphMode, max_tokens: int) -> TargetRunner:
    """The runner `graphs=` asks for: `auto` captures on CUDA and is eager on a CPU.

    Args:
        max_tokens: rows of the largest step; no larger bucket is made.

    Raises:
        ConfigurationError: an unknown mode, or `compiled` on CUDA.
    """
    sizes = tuple(size for size in (*CAPTURE_SIZES, *LARGE_SIZES) if size <= max_tokens)
    cuda = target.device.type == "cuda"
    if mode == "compiled" and not cuda:
        return CompiledRunner(target, sizes)
    if mode not in ("auto", "eager"):
        raise ConfigurationError(f"graphs is {mode!r}; allowed: auto, eager, and on a CPU compiled")
    if not cuda or mode == "eager":
        return EagerRunner(target)
    if not capturable():
        log.warning("CUDA graphs need the Triton attention kernel, which cannot be used here: passes run eagerly")
        return EagerRunner(target)
    return CudaGraphRunner(target, sizes)


def _bucket(sizes: Sequence[int], rows: int) -> int:
    """The smallest of the ascending `sizes` that holds `rows`; beyond the largest, `rows` itself."""
    index = bisect_left(sizes, rows)
    return sizes[index] if index < len(sizes) else rows


class EagerRunner:
    """The model as it is, with exactly the rows there are (or padded to `buckets`, which tests use)."""

    def __init__(self, target: Target, buckets: Sequence[int] = ()) -> None:
        self.target, self.buckets = target, tuple(sorted(buckets))
        self.replayed: bool | None = None

    def bucket(self, rows: int) -> int:
        return _bucket(self.buckets, rows)

    def prepare(self, cache: PagedCache, feature_layers: tuple[int, ...]) -> None:
        """Nothing to prepare."""

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput:
        return self.target.forward(batch, cache, feature_layers)


class CompiledRunner(EagerRunner):
    """Regional `torch.compile`: every decoder layer is one region, specialised per token bucket (CPU, opt-in).

    Inductor caches the kernels on disk, layers share them. If nothing can be compiled here (no C++ compiler, a construct Dynamo
    refuses), the model stays eager and one warning says why. Opt-in: the eager path runs native kernels whose rows are
    bit-identical in every batch, which generated code does not promise, and compiling takes seconds per bucket.
    """

    def __init__(
        self,
        target: Target,
        buckets: Sequence[int],
        compile: Callable[..., Any] = torch.compile,
        limit: int | None = None,
    ) -> None:
        super().__init__(target, buckets)
        self._compiled = list(target.decoder_layers)
        # Every bucket is a specialisation of its own.
        torch._dynamo.config.recompile_limit = max(
            torch._dynamo.config.recompile_limit, limit or 4 * len(self.buckets) + 8
        )
        for layer in self._compiled:
            layer.forward = compile(layer.forward, dynamic=False)

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput:
        try:
            return self.target.forward(batch, cache, feature_layers)
        except Exception as problem:
            if not self._compiled:
                raise
            self._restore()
            # The rows are written again, to the same places: a pass is repeatable.
            output = self.target.forward(batch, cache, feature_layers)
            log.warning("decoder layers cannot be compiled here, running them eagerly: %s", _first_line(problem))
            return output

    def _restore(self) -> None:
        for layer in self._compiled:
            vars(layer).pop("forward", None)  # uncovers its class's own
        self._compiled, self.buckets = [], ()


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem).strip() else ''}"


Capture = Callable[[Callable[[], TargetOutput]], tuple[Callable[[], None], TargetOutput]]
"""Records a pass: (replay, outputs), where every `replay()` runs it again and leaves the results in the same tensors."""


class CudaCapture:
    """Captures into CUDA graphs that share one memory pool.

    That is safe in any order of replays, because a pass reads nothing that an earlier one left in the pool, and its results,
    which are kept, have been consumed when the next one starts.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Callable[[], TargetOutput]) -> tuple[Callable[[], None], TargetOutput]:
        # Warm up on the stream that captures: kernels are compiled and libraries set themselves up on their first call,
        # which must not be recorded.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate and copy meanwhile; what they do is no part of the pass.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs


@dataclass(frozen=True)
class _Buffers:
    """What a captured pass reads, at fixed addresses, for N rows: as many as the largest bucket has."""

    table: Tensor  # [4 + groups, N] int64, the columns of a batch
    logit_rows: Tensor  # [N] int64

    @classmethod
    def zeros(cls, rows: int, groups: int, device: torch.device) -> _Buffers:
        table = torch.zeros(5 + groups, rows, dtype=torch.int64, device=device)
        return cls(table[:-1], table[-1])

    def view(self, rows: int, cache: PagedCache) -> FlatBatch:
        """The first `rows` as a batch. Block tables are the cache's own: they are only ever written in place."""
        return FlatBatch.of_table(cache, self.table[:, :rows], self.logit_rows[:rows])

    def fill(self, batch: FlatBatch) -> None:
        """Take a batch of exactly a bucket's rows: all of them are overwritten, padding included."""
        rows, logits = batch.num_rows, batch.logit_rows.shape[0]
        for static, new in zip(self.table.unbind(), batch.columns, strict=True):
            static[:rows].copy_(new)
        self.logit_rows[:logits].copy_(batch.logit_rows)
        self.logit_rows[logits:rows].zero_()


class CudaGraphRunner:
    """One CUDA graph per token bucket, captured largest first; larger passes run eagerly, and so do all of them, after one
    warning, where the model does something that cannot be captured.

    Args:
        target: on CUDA.
        sizes: token counts to capture.
        capture: how a pass is recorded (None: into CUDA graphs).
    """

    def __init__(self, target: Target, sizes: Sequence[int], capture: Capture | None = None) -> None:
        self.target, self.sizes = target, tuple(sorted(sizes))
        self.replayed: bool | None = False
        self._capture = capture
        self._graphs: dict[int, tuple[Callable[[], None], TargetOutput]] = {}

    def bucket(self, rows: int) -> int:
        return _bucket(self.sizes, rows)

    @torch.inference_mode()
    def prepare(self, cache: PagedCache, feature_layers: tuple[int, ...]) -> None:
        """Capture every bucket on padding rows, which touch nothing but the scratch block."""
        if not self.sizes:
            return
        capture = self._capture or CudaCapture()
        self._buffers = _Buffers.zeros(self.sizes[-1], len(cache.groups), self.target.device)
        self._prepared = (cache, feature_layers)
        try:
            for size in reversed(self.sizes):
                batch = self._buffers.view(size, cache)
                self._graphs[size] = capture(partial(self.target.forward, batch, cache, feature_layers))
        except RuntimeError as problem:
            log.warning("passes of %s cannot be captured in CUDA graphs and run eagerly: %s", self.target.name, problem)
            self._graphs, self.sizes = {}, ()

    def run(self, batch: FlatBatch, cache: PagedCache, feature_layers: tuple[int, ...]) -> TargetOutput:
        self.replayed = batch.num_rows in self._graphs
        if not self.replayed:
            return self.target.forward(batch, cache, feature_layers)
        assert self._prepared == (cache, feature_layers), "a graph reads the cache it was captured with"
        replay, outputs = self._graphs[batch.num_rows]
        self._buffers.fill(batch)
        replay()
        return TargetOutput(outputs.logits[: batch.logit_rows.shape[0]], outputs.features)
