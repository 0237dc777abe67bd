"""A step as plain data: what rank 0 of a group sends to the others, and when.

1. Before every step, its `StepInputs`: sizes, widths, updates of the device state. No callable is among them.
2. Where the planner chooses K in the middle of the step (`WidthPlan.decide`), a second message between draft and
   verification: the `Decision`. The other ranks wait for it in the same place.

Dataclasses and named tuples become objects with their fields by name; `from_plain` reads them by their declared types.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from surefoot.engine.messages import StepInputs, WidthPlan
from surefoot.parallel.group import Group, Plain
from surefoot.speculation.planner import Decision

CALLABLES = {WidthPlan: frozenset({"decide"})}
"""Fields that stay on their rank."""


def send_step(group: Group, inputs: StepInputs) -> StepInputs:
    """Send a step from rank 0.

    Returns:
        What rank 0 runs itself: the same inputs, whose `decide` sends its decision as well.
    """
    if group.size == 1:
        return inputs
    decide = inputs.plan.decide
    group.broadcast({"inputs": to_plain(inputs), "decides": decide is not None})
    if decide is None:
        return inputs

    def decide_and_send(survival: Tensor, limits: Tensor) -> Decision:
        decision = decide(survival, limits)
        group.broadcast(to_plain(decision))
        return decision

    return replace(inputs, plan=replace(inputs.plan, decide=decide_and_send))


def receive_step(group: Group) -> StepInputs:
    """The next step of rank 0, on another rank; its `decide` receives the decision of rank 0."""
    message = cast("dict[str, Any]", group.broadcast(None))
    inputs: StepInputs = from_plain(StepInputs, message["inputs"])
    if not message["decides"]:
        return inputs

    def receive_decision(survival: Tensor, limits: Tensor) -> Decision:
        decision: Decision = from_plain(Decision, group.broadcast(None))
        return decision

    return replace(inputs, plan=replace(inputs.plan, decide=receive_decision))


def to_plain(value: Any) -> Plain:
    """The value as JSON data.

    Raises:
        TypeError: something that is neither a number, a string, a container of them, nor a dataclass or named tuple.
    """
    if isinstance(value, Enum):
        return cast("Plain", value.value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return cast("Plain", value.item())
    if isinstance(value, np.ndarray):
        return cast("Plain", value.tolist())
    if is_dataclass(value) or hasattr(value, "_fields"):
        return {name: to_plain(getattr(value, name)) for name in _sent_fields(cast("Any", type(value)))}
    if isinstance(value, Mapping):
        return [[to_plain(name), to_plain(item)] for name, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be sent to another rank: it is no plain data")


def from_plain(kind: Any, data: Any) -> Any:
    """The value of type `kind` that `to_plain` made `data` of."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        held = [argument for argument in arguments if argument is not types.NoneType]
        lists = [argument for argument in held if isinstance(data, list) and get_origin(argument) is not None]
        return from_plain((lists or held)[0], data)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return {from_plain(arguments[0], name): from_plain(arguments[1], item) for name, item in data}
    if origin is list:
        return [from_plain(arguments[0], item) for item in data]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return tuple(from_plain(arguments[0], item) for item in data)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in data.items()})
    return kind(data) if isinstance(kind, type) and issubclass(kind, Enum) else data


@cache
def _sent_fields(kind: Any) -> tuple[str, ...]:
    names = kind._fields if hasattr(kind, "_fields") else [entry.name for entry in fields(kind)]
    return tuple(name for name in names if name not in CALLABLES.get(kind, ()))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
