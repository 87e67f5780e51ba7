"""Small modules, and a loss that is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Model = Callable[..., Any]


class Net(nn.Module):
    """Two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))  # type: ignore[no-any-return]  # as modules are typed


def squares(model: Model, x: torch.Tensor) -> torch.Tensor:
    """A loss, differentiated."""
    loss: torch.Tensor = model(x).pow(2).sum()
    loss.backward()
    return loss


class Takes(nn.Module):
    """A function as a module, with a weight that it is given."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.weights)


def seen(x: torch.Tensor) -> Callable[[Model], torch.Tensor]:
    return partial(squares, x=x)
