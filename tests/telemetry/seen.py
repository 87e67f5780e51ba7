"""A model, and the calls of it that are seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sardonyx
from sardonyx.telemetry.calls import Call


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *rest: Any, mask: Any = None, **more: Any) -> Any:
        return self.last(self.first(x).relu()) * scale

    def twice(self, x: torch.Tensor) -> Any:
        return self.forward(x) + self(x)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def seen(model: nn.Module, **how: Any) -> list[Call]:
    calls: list[Call] = []
    sardonyx.intercept(model, calls.append, **how)
    return calls


@dataclass
class Batch:
    tokens: torch.Tensor
    label: str
