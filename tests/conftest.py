"""Every test starts from a clean dynamo, without gradients, with the same random numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.clock import Clock


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread_each() -> None:
    """Two test processes share two cores; pools larger than one thread would spin against each other."""
    torch.set_num_threads(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For the test, what is measured takes as long as the test says, whatever else the machine does."""
    made = Clock()
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, made)
    return made
