"""Which replica a request goes to: the one of its session first, then the shorter of two queues. Ray imports this by name."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter


class SessionRouter(PowerOfTwoChoicesRequestRouter):
    """Ray's own router, with the replica of `X-Session-Id` before those it chooses; a full one is passed over."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        ranked: list[list[Any]] = await super().choose_replicas(candidate_replicas, pending_request)
        session = getattr(getattr(pending_request, "metadata", None), "session_id", None)
        if not session or not candidate_replicas:
            return ranked
        return [[favourite(session, candidate_replicas, lambda replica: str(replica.replica_id.unique_id))], *ranked]


def favourite(session: str, replicas: list[Any], name: Callable[[Any], str]) -> Any:
    """The replica of a session: the largest hash of both. If one leaves, only its own sessions move."""
    return max(replicas, key=lambda replica: blake2b(f"{session}\0{name(replica)}".encode(), digest_size=8).digest())
