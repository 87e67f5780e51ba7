"""Operators that torch takes apart wrongly while it traces, kept whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey

Formula: TypeAlias = Callable[..., Any]
_aten = torch.ops.aten


def _bytes_kept(operator: Any, formula: Formula, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The operator itself for bytes, which have no gradients, and its formula for other dtypes."""
    if x.dtype != torch.uint8:
        return formula(x, *args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(x, *args, **kwargs)


def _bytes_kept_by_vector(
    operator: Any,
    formula: Formula,
    x: torch.Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Any:
    """The same for an overload that takes sizes and scales as lists."""
    if x.dtype != torch.uint8:
        return formula(x, output_size, align_corners, scale_factors)
    from torch._decomp.decompositions import upsample_compute_output_size

    size = upsample_compute_output_size(x.size(), output_size, scale_factors)  # type: ignore[no-untyped-call]  # torch's
    return operator.overloadpacket.default(x, size, align_corners, *(scale_factors or (None, None)))


_KEPT: Mapping[Any, Formula | None] = {
    _aten.multilabel_margin_loss_forward.default: None,  # torch 2.13 counts labels after the first negative one too
    _aten.upsample_bilinear2d.default: _bytes_kept,  # whose weights are integers, and whose rows are rounded to bytes
    _aten.upsample_bilinear2d.vec: _bytes_kept_by_vector,
    _aten.upsample_bicubic2d.default: _bytes_kept,
    _aten.upsample_bicubic2d.vec: _bytes_kept_by_vector,
}
"""What comes in the place of torch's formula: nothing, or a function of the operator, the formula and the arguments."""


@contextmanager
def keeping_whole() -> Iterator[None]:
    """While active, tracing finds these operators as they are; afterwards torch is as it was."""
    formulas = [
        (operator, key, operator.py_kernels.pop(key))
        for operator in _KEPT
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
        if key in operator.py_kernels
    ]
    for operator, key, formula in formulas:
        kept = _KEPT[operator]
        if kept is not None:
            operator.py_kernels[key] = partial(kept, operator, formula)
    _forget_dispatch()
    try:
        yield
    finally:
        for operator, key, formula in formulas:
            operator.py_kernels[key] = formula
        _forget_dispatch()


def _forget_dispatch() -> None:
    for operator in _KEPT:
        operator._dispatch_cache.clear()
