"""A module twice, eager and compiled, from the same weights: what happens to one must happen to the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

TOLERANCE = 1e-5


def twins(model: nn.Module, **compile_options: Any) -> tuple[nn.Module, Any]:
    """The module in eager, and a copy of it through ONNX alone: what would stay in torch is an error."""
    options = {"fallback": "error", **compile_options.pop("options", {})}
    return model, torch.compile(copy.deepcopy(model), backend="sardonyx", options=options, **compile_options)


def same(got: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Assert that two trees of tensors are near each other, and None where the other is None."""
    for ours, theirs in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if theirs is None or ours is None:
            assert ours is theirs
        else:
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def same_state(ours: nn.Module, eager: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Assert that parameters, their gradients and buffers are near each other."""
    same([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], tolerance)
    same(list(ours.parameters()), list(eager.parameters()), tolerance)
    same(list(ours.buffers()), list(eager.buffers()), tolerance)


def both(model: nn.Module, do: Callable[[Any], Any], **compile_options: Any) -> tuple[nn.Module, Any]:
    """Do something with the module and with its compiled twin; results and state must agree afterwards."""
    eager, compiled = twins(model, **compile_options)
    torch.manual_seed(1)
    expected = do(eager)
    torch.manual_seed(1)
    same(do(compiled), expected)
    same_state(compiled, eager)
    return eager, compiled
