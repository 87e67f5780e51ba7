"""Preserve composite operators whose decomposition in torch gives wrong or slow results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import DispatchKey
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

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
def preserve_attention(device_type: str = "cuda") -> Iterator[None]:
    """While active, torch keeps scaled dot-product attention on this device as one operator.

    On CUDA it becomes one of several kernels, or products and a softmax, depending on strides and settings; engines
    have one kernel for all.
    """
    operator = _aten.scaled_dot_product_attention.default
    below_autograd = DispatchKey.AutogradCUDA if device_type == "cuda" else DispatchKey.AutogradCPU

    def decompose(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mode = _get_current_dispatch_mode()
        if query.device.type == device_type and not isinstance(mode, FakeTensorMode):
            return NotImplemented
        return operator._op_dk(DispatchKey.CompositeImplicitAutograd, query, *args, **kwargs)

    def keep(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    operator.py_kernels |= {DispatchKey.CompositeImplicitAutograd: decompose, below_autograd: keep}
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for key in (DispatchKey.CompositeImplicitAutograd, below_autograd):
            del operator.py_kernels[key]
        operator._dispatch_cache.clear()


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
