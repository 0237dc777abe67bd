"""What every test shares: one thread for tiny models (two would mostly wait for each other), all cores for real targets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

ALL_THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def all_threads() -> Iterator[None]:
    """All cores, for the length of a module."""
    torch.set_num_threads(ALL_THREADS)
    yield
    torch.set_num_threads(1)
