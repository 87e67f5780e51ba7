"""Functions with branches and loops, and how their results and gradients are compared with eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops import scan, while_loop
from torch.utils._pytree import tree_leaves

from sardonyx.telemetry.report import Report, collecting

from .agreement import agrees, onnx

Function = Callable[..., Any]


def agree_both_ways(function: Function, x: Tensor) -> None:
    """Assert agreement where the condition holds, and where it does not."""
    agrees(function, x)
    agrees(function, -x)


def gradients_agree(function: Function, *calls: tuple[Tensor, ...], dynamic: bool = False) -> Report:
    """Assert that gradients through ONNX alone are eager's."""
    compiled = onnx(function, dynamic=dynamic)
    with collecting() as report:
        for args in calls:
            torch.testing.assert_close(_gradients(compiled, args), _gradients(function, args), rtol=1e-4, atol=1e-5)
    assert not report.fallbacks
    return report


@torch.enable_grad()
def _gradients(function: Function, args: tuple[Tensor, ...]) -> list[Any]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    results = [r for r in tree_leaves(function(*leaves)) if r.is_floating_point()]
    sum((r * torch.arange(1.0, r.numel() + 1).view(r.shape)).sum() for r in results).backward()
    return [x.grad for x in leaves] + [r.detach() for r in results]


def branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x.sin(), x.max()), lambda x: (x * x.shape[0], x.mean()), (x,))


def nested(x: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 1, lambda x: x + 1, lambda x: x - x.shape[0], (x,)).relu()

    return torch.cond(x.sum() > 0, inner, lambda x: x.clone(), (x,))


def times(x: Tensor, n: Tensor) -> Any:
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, torch.sin(x) * 1.5 + i), (torch.tensor(0), x))


def counting(x: Tensor) -> Any:
    return while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i + 1, torch.sin(x) * i), (0, x))


def loops_in_loops(x: Tensor, n: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = while_loop(lambda j, x: j < i, lambda j, x: (j + 1, x * 1.1 + i), (torch.tensor(0), x))[1]
        return i + 1, torch.cond(x.sum() > 20, lambda x: x * 0.5, lambda x: x + 1, (x,))

    return while_loop(lambda i, x: i < n, body, (torch.tensor(0), x))


def accumulate(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x, c * x.sin()), x.new_zeros(x.shape[1]), x, dim=0)
