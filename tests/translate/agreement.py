"""Compiling a function with nothing left to torch, and comparing it with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-7}


def onnx(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    """The function through ONNX alone: an operator that would stay in torch is an error."""
    torch._dynamo.reset()
    return torch.compile(function, backend="sardonyx", fullgraph=True, dynamic=dynamic, options={"fallback": "error"})


def agrees(function: Callable[..., Any], *args: Any, exact: bool = False) -> None:
    """Assert that ONNX gives eager's shapes and dtypes, and the values that eager has in double precision.

    `exact` compares with eager in the dtype given, for functions whose rounding is part of what they do.
    """
    _compare(onnx(function)(*args), function(*args), _reference(function, args, exact))


def agrees_at(function: Callable[..., Any], *calls: tuple[Any, ...]) -> None:
    """Assert agreement for several calls of one compilation with symbolic sizes."""
    compiled = onnx(function, dynamic=True)
    for args in calls:
        _compare(compiled(*args), function(*args), _reference(function, args, exact=False))


def _reference(function: Callable[..., Any], args: tuple[Any, ...], exact: bool) -> Any:
    return function(*(args if exact else tree_map(_widened, args)))


def _widened(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _compare(result: Any, eager: Any, reference: Any) -> None:
    triples = zip(tree_leaves(result), tree_leaves(eager), tree_leaves(reference), strict=True)
    for got, expected, exact in triples:
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        tolerance = TOLERANCE.get(got.dtype, 0)
        torch.testing.assert_close(got, exact.to(got.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)


def gradients(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> list[torch.Tensor]:
    """Those of the arguments, each element of the result weighing differently."""
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for x in args]
        result = function(*leaves)
        weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
        return list(torch.autograd.grad((result * weights).sum(), leaves))
