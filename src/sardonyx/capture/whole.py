"""Operators that torch takes apart wrongly while it traces, kept whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import DispatchKey

_WRONG = (torch.ops.aten.multilabel_margin_loss_forward.default,)
"""The formula of torch 2.13 also counts labels after the first negative one."""


@contextmanager
def keeping_whole() -> Iterator[None]:
    """While active, tracing finds these operators as they are; afterwards torch is as it was."""
    taken = [operator.py_kernels.pop(DispatchKey.Autograd, None) for operator in _WRONG]
    _forget_dispatch()
    try:
        yield
    finally:
        for operator, kernel in zip(_WRONG, taken, strict=True):
            if kernel is not None:
                operator.py_kernels[DispatchKey.Autograd] = kernel
        _forget_dispatch()


def _forget_dispatch() -> None:
    for operator in _WRONG:
        operator._dispatch_cache.clear()
