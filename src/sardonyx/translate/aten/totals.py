"""Sums and products of integers, exact modulo 2⁶⁴ as in torch: ONNX Runtime reduces integers in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import element_count
from sardonyx.translate.aten.scan import running_product
from sardonyx.translate.builder import Builder

Value = ir.Value

_EXACT_IN_DOUBLE = 2**53
_MOST_ELEMENTS = 2**36
"""A bound for the size of a symbolic sum, larger than memory."""


def integer_sum(g: Builder, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """Sum over axes in int64: a matrix product with ones, unless double precision represents every sum exactly."""
    wide = g.cast(x, torch.int64)
    dims = _reduced(g, x, axes, keepdim)
    count = element_count([g.dims(x)[axis] for axis in axes])
    if _largest(g, x) * (count if isinstance(count, int) else _MOST_ELEMENTS) <= _EXACT_IN_DOUBLE:
        return g.shaped(g.ReduceSum(wide, g.ints(axes), keepdims=int(keepdim)), dims)
    if g.out.device.type == "cuda":  # CUDA has no kernel for an int64 product
        lines = _lines(g, wide, axes)
        sums = g.CumSum(lines, g.scalar(1, torch.int64))
        return g.reshape(g.shaped(g.slice(sums, 1, count - 1, count), [g.dims(lines)[0], 1]), dims)
    if list(axes) == list(range(len(axes))):
        rows = g.reshape(wide, [count, element_count(g.dims(x)[len(axes) :])])
        return g.reshape(g.MatMul(_ones(g, [1, count]), rows), dims)
    return g.reshape(g.MatMul(_lines(g, wide, axes), _ones(g, [count, 1])), dims)


def _ones(g: Builder, dims: Sequence[Dim]) -> Value:
    return g.expand(g.scalar(1, torch.int64), dims)


def _largest(g: Builder, x: Value) -> int:
    """Return a bound of the absolute values, by the narrowest dtype that the elements were cast from."""
    producer = x.producer()
    source = producer.inputs[0] if producer is not None and producer.op_type == "Cast" else None
    return min(_limit(g.dtype(v)) for v in (x, source) if v is not None and v.dtype is not None)


def _limit(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 1
    limits = torch.iinfo(dtype if dtypes.is_integer(dtype) else torch.int64)
    return max(-limits.min, limits.max)


def _reduced(g: Builder, x: Value, axes: Sequence[int], keepdim: bool) -> list[Dim]:
    return [1 if i in axes else size for i, size in enumerate(g.dims(x)) if keepdim or i not in axes]


def _lines(g: Builder, x: Value, axes: Sequence[int]) -> Value:
    """Return a matrix whose rows are reduced."""
    others = [axis for axis in range(g.rank(x)) if axis not in axes]
    sizes = [element_count([g.dims(x)[axis] for axis in which]) for which in (others, axes)]
    return g.reshape(g.transpose(x, [*others, *axes]), sizes)


def integer_product(g: Builder, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """Return the product over some axes, in int64, by multiplying halves with halves."""
    dims = _reduced(g, x, axes, keepdim)
    wide = g.cast(x, torch.int64)
    if _largest(g, x) == 1:
        return g.shaped(g.ReduceProd(wide, g.ints(axes), keepdims=int(keepdim)), dims)
    lines = _lines(g, wide, axes)
    rows, count = g.dims(lines)
    if not isinstance(count, int):
        return g.reshape(_last_product(g, lines), dims)
    while count > 1:
        half = count // 2
        parts = [g.shaped(g.slice(lines, 1, at, at + half), [rows, half]) for at in (0, half)]
        product, rest = g.Mul(*parts), count % 2
        if rest:
            odd = g.shaped(g.slice(lines, 1, count - 1, count), [rows, 1])
            product = g.shaped(g.Concat(product, odd, axis=1), [rows, half + 1])
        lines, count = product, half + rest
    return g.reshape(lines, dims)


def _last_product(g: Builder, lines: Value) -> Value:
    """Return the products of rows of symbolic length, which may be empty: each begins with a one."""
    rows, count = g.dims(lines)
    padded = g.Pad(lines, g.ints([1, 0]), g.scalar(1, torch.int64), g.ints([1]))
    products = running_product(g, g.shaped(padded, [rows, count + 1]), 1)
    return g.shaped(g.slice(products, 1, count, count + 1), [rows, 1])
