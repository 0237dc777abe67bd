"""What every test shares: one thread for tiny models (two would mostly wait for each other), all cores for real targets,
unless another test process has the other core."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from surefoot.speculation import guard

# The same examples in every run, so that what passed here passes elsewhere; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ALL_THREADS = torch.get_num_threads()

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in the background by a shell: the tests of Ctrl-C want it back
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_guard() -> Iterator[None]:
    """Drafts of a tiny model cost more than they save: the guard would switch them off, and what is tested with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "FIRST_AFTER", 1 << 60)
        yield


@pytest.fixture(scope="module")
def all_threads() -> Iterator[None]:
    """All cores, for the length of a module."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else ALL_THREADS)
    yield
    torch.set_num_threads(1)
