"""Faults at every stage of a step, before the stage has done its work or after."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

STAGES: dict[str, tuple[str, str]] = {  # stage -> attribute of the engine, method
    "schedule": ("scheduler", "schedule"),
    "reserve": ("blocks", "reserve"),
    "plan": ("policy", "plan"),
    "apply": ("state", "apply"),
    "draft": ("drafter", "propose"),
    "allocate": ("decode_step", "_allocate"),
    "pack": ("decode_step", "_pack"),
    "target": ("decode_step.runner", "run"),
    "accept": ("decode_step", "_accept"),
    "commit": ("decode_step", "_commit"),
    "extend": ("drafter", "extend"),
    "collect": ("", "_emit"),
    "register": ("blocks", "commit"),
    "observe": ("policy.learner", "observe"),
}
ONE_REQUEST = ("collect", "register")
"""Stages that work for one request: a fault there ends it, and nobody else."""


class Injected(RuntimeError):
    """A fault of a test."""


KINDS: dict[str, Any] = {
    "exception": Injected,
    "interrupt": KeyboardInterrupt,
    "out of memory": torch.OutOfMemoryError,
    "host out of memory": MemoryError,
}


class Fault(NamedTuple):
    stage: str
    error: BaseException
    after: bool  # the stage has done its work by then


class Faults:
    """Wraps the stages of an engine. An armed fault is raised once, when its stage comes; `remove` unwraps them.

    `fired` counts by stage.
    """

    def __init__(self, engine: Any) -> None:
        self.armed: dict[str, Fault] = {}
        self.fired: Counter[str] = Counter()
        self._wrapped: list[tuple[Any, str]] = []
        for stage, (path, method) in STAGES.items():
            owner = engine
            for name in filter(None, path.split(".")):
                owner = getattr(owner, name)
            if owner is not None:
                self._wrap(owner, method, stage)

    def _wrap(self, owner: Any, method: str, stage: str) -> None:
        honest = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fault = self.armed.get(stage)
            if fault is not None and not fault.after:
                self._fire(stage)
            result = honest(*args, **kwargs)
            if fault is not None and fault.after and stage in self.armed:
                self._fire(stage)
            return result

        setattr(owner, method, wrapped)
        self._wrapped.append((owner, method))

    def _fire(self, stage: str) -> None:
        fault = self.armed.pop(stage)
        self.fired[stage] += 1
        raise fault.error

    def arm(self, stage: str, kind: str, after: bool) -> None:
        self.armed[stage] = Fault(stage, KINDS[kind](f"injected at {stage}"), after)

    def remove(self) -> None:
        for owner, method in self._wrapped:
            delattr(owner, method)
