"""Every test starts from a clean dynamo, without gradients, with the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


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
