"""Every operator of our own table on samples of PyTorch's operator database; `make ops-full` runs all of both."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from .check import check
from .database import in_own_table, operators

SAMPLES = 2


@pytest.fixture(autouse=True)
def no_seeds_for_absent_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database seeds before each sample, and torch writes down the stack for each kind of device."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            monkeypatch.setattr(device, "manual_seed_all", lambda seed: None)


@cache
def own() -> dict[str, Any]:
    return {name: op for name, op in operators().items() if in_own_table(op)}


@pytest.mark.parametrize("name", sorted(own()))
def test_samples_of_pytorchs_database_agree_with_eager(name: str) -> None:
    outcome = check(name, own()[name], torch.float32, SAMPLES)
    assert not outcome.wrong + outcome.crashed
