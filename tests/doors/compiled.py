"""A small model, compiled with nothing left to torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def compiled(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(model, backend="sardonyx", dynamic=dynamic, options={"fallback": "error", **options})


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
