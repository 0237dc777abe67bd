"""One live server over the tiny model for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.cli.conftest import checkpoints  # noqa: F401  (a fixture)
from tests.serving.server import Live, engine, serve, tiny


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serve(engine(tiny())) as live:
        yield live


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=60) as client:
        yield client
