"""How long requests may become and how many cache blocks that takes."""

from __future__ import annotations

from functools import partial

import torch

from surefoot.cache.paged import PagedCache
from surefoot.drafters.base import Drafter
from surefoot.engine.options import EngineOptions
from surefoot.errors import ConfigurationError
from surefoot.machine import total_memory
from surefoot.targets.target import Target


def model_length(target: Target, options: EngineOptions) -> int:
    """Longest prompt and answer in tokens.

    Raises:
        ConfigurationError: the target cannot address so many.
    """
    limit = target.max_model_len
    if options.max_model_len is None:
        return min(limit, 8192)
    if not 1 < options.max_model_len <= limit:
        raise ConfigurationError(
            f"max_model_len={options.max_model_len} is outside 2 ... {limit}, what {target.name} can address"
        )
    return options.max_model_len


def make_cache(
    target: Target, drafter: Drafter | None, options: EngineOptions, length: int, frontier: int
) -> PagedCache:
    """The paged cache of an engine.

    Args:
        length: most positions of a request, those of a step in flight and of the next one included.
        frontier: positions of one block.

    Raises:
        ConfigurationError: it cannot hold one request, or does not fit into memory.
    """
    num_blocks, num_window_blocks = _cache_blocks(target, drafter, options, length, frontier)
    make = partial(
        PagedCache,
        target.layers,
        drafter.cache_layers if drafter else (),
        num_blocks=num_blocks,
        num_window_blocks=num_window_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=length,
        dtype=target.dtype,
        states=target.states,
        frontier=frontier,
    )
    _check_memory(make(device="meta").num_bytes, target.device)
    return make(device=target.device)


def _check_memory(wanted: int, device: torch.device) -> None:
    """Refuse a cache that cannot fit, rather than let the system end this process when the cache fills."""
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else total_memory()
    if memory and wanted > memory:
        raise ConfigurationError(
            f"the cache takes {wanted / 2**30:.1f} GiB and there are {memory / 2**30:.1f} GiB of memory: lower num_blocks, "
            "cache_bytes, max_num_seqs or max_model_len"
        )


def _cache_blocks(
    target: Target, drafter: Drafter | None, options: EngineOptions, length: int, frontier: int
) -> tuple[int, int]:
    """Blocks of the full and of every sliding group.

    Every slot can reach the full length, unless that takes more than `cache_bytes`; one request always fits.
    """
    size = options.block_size
    per_sequence = -(-length // size)
    windows = {spec.window for spec in target.layers if spec.window is not None}
    window_blocks = 0
    if windows:
        # What a row sees, and after it the chunk and the frontier of two steps: one in flight, one being prepared.
        reach = max(windows) + 2 * (options.max_num_batched_tokens + frontier)
        window_blocks = 1 + options.max_num_seqs * min(per_sequence, -(-reach // size) + 1)
    if options.num_blocks is not None:
        wanted = options.num_blocks
        if wanted < per_sequence + 1:
            raise ConfigurationError(
                f"num_blocks={wanted} cannot hold one request of {length} positions in blocks of {size}: "
                f"allow at least {per_sequence + 1}, or lower max_model_len"
            )
        return wanted, min(window_blocks, wanted)
    layers = [spec for spec in target.layers if spec.window is None]
    layers += list(drafter.cache_layers) if drafter else []
    block_bytes = sum(spec.entry_size / spec.stride for spec in layers) * target.dtype.itemsize * size
    affordable = int(options.cache_bytes // max(block_bytes, 1))
    return 1 + max(per_sequence, min(per_sequence * options.max_num_seqs, affordable)), window_blocks
