"""Examples as the old systems' documents have them: only imports differ, and names that `sardonyx.compat` maps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, with gradients and logs as a fresh process has them."""
    monkeypatch.chdir(tmp_path)
    ours = logging.getLogger("sardonyx")
    level = ours.level
    with torch.enable_grad():
        yield
    ours.setLevel(level)
