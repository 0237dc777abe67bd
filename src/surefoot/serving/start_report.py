"""What stands where when the server starts, and what speculation needs to pay: a few lines for a terminal or a log."""

from __future__ import annotations

from typing import Any

import torch

from surefoot.llm import LLM
from surefoot.serving.settings import ServeSettings
from surefoot.serving.state import ServerState
from surefoot.speculation.cost import CostTable
from surefoot.speculation.simulation import break_even_tokens


def start_report(llm: LLM, state: ServerState, url: str) -> list[str]:
    """The lines."""
    engine, settings = llm.engine, state.settings
    facts = llm.describe()
    target, options = llm.target, engine.options
    threads = f", {torch.get_num_threads()} threads" if str(target.device) == "cpu" else ""
    lines = [
        f"target    {target.name}: {facts['target_weights']}, {_bytes(weights_bytes(target))} on {target.device}{threads}",
        f"drafter   {facts['drafter']}{_drafter_bytes(engine.drafter)}, at most {engine.gamma} drafts a step",
        f"cache     {_bytes(facts['cache_bytes'])}, {options.max_num_seqs} answers at once, "
        f"{facts['max_model_len']} tokens each, up to {settings.max_queue} waiting",
        f"planner   {facts['planner']}",
        f"costs     {table_line(engine.policy.costs.table, engine.gamma, facts['drafter'])}",
        f"chat      {state.dialect.describe()}",
        f"access    {access_line(settings)}",
        f"serving   {state.model} at {url}",
    ]
    return lines


def weights_bytes(target: Any) -> int:
    """Bytes of everything a target or drafter holds in tensors, each storage once."""
    model = getattr(target, "model", target)
    if not isinstance(model, torch.nn.Module):
        return 0
    seen: dict[int, int] = {}
    for module in model.modules():
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        held += [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in held:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def _drafter_bytes(drafter: Any) -> str:
    trained = getattr(drafter, "trained", drafter)
    size = weights_bytes(trained) if trained is not None else 0
    return f", {_bytes(size)}" if size else ""


def table_line(table: CostTable | None, gamma: int, drafter: str) -> str:
    """Whether costs are known, and from which acceptance on speculation pays with them."""
    if drafter == "none":
        return "target-only"
    if table is None:
        return "no cost table, every draft is verified: measure one with --profile"
    width, acceptance = break_even(table, gamma)
    return (
        f"cost table {table.steadiness}; pays from an acceptance of {100 * acceptance:.0f} % per token (width {width})"
    )


def break_even(table: CostTable, gamma: int) -> tuple[int, float]:
    """The width that pays soonest, and the acceptance per token from which on it does, for one request.

    With acceptance a at every position, width w emits 1 + a + … + a^w tokens a step.
    """
    found = []
    for width in range(1, gamma + 1):
        needed = break_even_tokens(table, width)
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            emitted = sum(middle**k for k in range(width + 1))
            low, high = (middle, high) if emitted < needed else (low, middle)
        found.append((high, width))
    acceptance, width = min(found)
    return width, acceptance


def access_line(settings: ServeSettings) -> str:
    """Who may call."""
    keys = f"{len(settings.api_keys)} API keys" if settings.api_keys else "no API key"
    local = settings.host in ("127.0.0.1", "::1", "localhost")
    return f"{keys}; {'this machine only' if local else f'LISTENS ON {settings.host}: other machines can reach it'}"


def _bytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.0f} MiB"
