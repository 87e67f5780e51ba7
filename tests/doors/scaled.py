"""A module that reads more than its arguments."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """Reads a number, a list, a setting and a buffer beside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.arange(4.0))
        self.scale, self.powers, self.settings = 2, [1.0], {"sign": 1}
        self.table = np.ones(4, dtype=np.float32)
        self.extra = torch.ones(4)

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        y = self.inner(x) * self.scale + self.shift + self.extra
        for power in self.powers:
            y = y + power
        y = y * self.settings["sign"] + torch.from_numpy(self.table)
        return -y if flip else y

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(x)

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            x = self(x)
            yield x

    async def later(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(x)
        return result


def scaled() -> Scaled:
    return Scaled().eval()
