"""Preserve composite operators whose decomposition in torch gives wrong results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey

Decomposition: TypeAlias = Callable[..., Any]
_aten = torch.ops.aten


def _preserve_for_bytes(operator: Any, decomposition: Decomposition, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Keep the operator for uint8, which has no gradient; decompose other dtypes."""
    if x.dtype != torch.uint8:
        return decomposition(x, *args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(x, *args, **kwargs)


def _preserve_vector_overload_for_bytes(
    operator: Any,
    decomposition: Decomposition,
    x: torch.Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Any:
    """The same for the overload that takes sizes and scales as lists."""
    if x.dtype != torch.uint8:
        return decomposition(x, output_size, align_corners, scale_factors)
    from torch._decomp.decompositions import upsample_compute_output_size

    size = upsample_compute_output_size(x.size(), output_size, scale_factors)  # type: ignore[no-untyped-call]  # torch's
    return operator.overloadpacket.default(x, size, align_corners, *(scale_factors or (None, None)))


_PRESERVED: Mapping[Any, Decomposition | None] = {
    _aten.multilabel_margin_loss_forward.default: None,  # torch 2.13 counts labels after the first negative one too
    _aten.upsample_bilinear2d.default: _preserve_for_bytes,  # integer weights, rows rounded to bytes
    _aten.upsample_bilinear2d.vec: _preserve_vector_overload_for_bytes,
    _aten.upsample_bicubic2d.default: _preserve_for_bytes,
    _aten.upsample_bicubic2d.vec: _preserve_vector_overload_for_bytes,
}
"""What replaces the decomposition: nothing, or a function of operator, decomposition and arguments."""


@contextmanager
def preserve_composite_ops() -> Iterator[None]:
    """While active, torch does not decompose these operators."""
    decompositions = [
        (operator, key, operator.py_kernels.pop(key))
        for operator in _PRESERVED
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
        if key in operator.py_kernels
    ]
    for operator, key, decomposition in decompositions:
        replacement = _PRESERVED[operator]
        if replacement is not None:
            operator.py_kernels[key] = partial(replacement, operator, decomposition)
    _clear_dispatch_caches()
    try:
        yield
    finally:
        for operator, key, decomposition in decompositions:
            operator.py_kernels[key] = decomposition
        _clear_dispatch_caches()


def _clear_dispatch_caches() -> None:
    for operator in _PRESERVED:
        operator._dispatch_cache.clear()
