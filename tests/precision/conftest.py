"""Times that do not depend on the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from sardonyx.run import attention_trials, layer_trials, precision_choice, region_precision


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each precision of a layer is faster than the one before, float32 first; and the model with it."""

    def in_turns(calls: Sequence[Callable[[], Any]], **_: Any) -> list[list[float]]:
        return [[1.0 / (1 + order)] for order in _orders(len(calls))]

    monkeypatch.setattr(layer_trials, "in_turns", in_turns)
    monkeypatch.setattr(attention_trials, "in_turns", in_turns)
    monkeypatch.setattr(precision_choice, "in_turns", in_turns)
    monkeypatch.setattr(region_precision, "in_turns", in_turns)


def _orders(count: int) -> list[int]:
    """Of float32, int4, int8 and bf16, those with fewer bits are faster."""
    return {1: [0], 2: [0, 1], 3: [0, 2, 1], 4: [0, 3, 2, 1]}[count]
