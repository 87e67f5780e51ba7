"""Distances between points, and their gradients."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.translate.aten.reduction import linalg_vector_norm
from sardonyx.translate.aten.scatter import scatter_combined
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value

_PAIRS_ONE_BY_ONE = 25
"""Up to this number of rows torch computes differences; above, products, which are faster and less accurate."""


@aten("dist")
def dist(g: Builder, x: Value, y: Value, p: float = 2) -> Value:
    difference = g.Sub(g.cast(x, g.out.dtype), g.cast(y, g.out.dtype))
    return linalg_vector_norm(g, difference, p)


@aten("_cdist_forward")
def cdist(g: Builder, x: Value, y: Value, p: float, compute_mode: int | None) -> Value:
    rows = (g.dims(x)[-2], g.dims(y)[-2])
    large = any(isinstance(n, int) and n > _PAIRS_ONE_BY_ONE for n in rows)
    if p == 2 and (compute_mode == 1 or (large and compute_mode in (None, 0))):
        return _distances_by_products(g, x, y)
    return _norm(g, _differences(g, x, y), p)


def _norm(g: Builder, difference: Value, p: float) -> Value:
    """Return the norm of each difference; for p = 0 a count, in which NaN remains NaN, except on CUDA."""
    if p:
        return linalg_vector_norm(g, difference, p, [-1])
    counted = g.cast(g.Not(g.Equal(difference, g.scalar(0, g.out.dtype))), g.out.dtype)
    if g.out.device.type != "cuda":
        counted = g.Where(g.IsNaN(difference), difference, counted)
    return g.ReduceSum(counted, g.ints([-1]), keepdims=0)


def _differences(g: Builder, x: Value, y: Value) -> Value:
    """Return every point of `x` minus every point of `y`."""
    return g.Sub(g.unsqueeze(x, [-2]), g.unsqueeze(y, [-3]))


def _distances_by_products(g: Builder, x: Value, y: Value) -> Value:
    axes = list(range(g.rank(y)))
    cross = g.MatMul(x, g.transpose(y, [*axes[:-2], axes[-1], axes[-2]]))
    last = g.ints([-1])
    squares = [g.shaped(g.ReduceSum(g.Mul(v, v), last, keepdims=1), [*g.dims(v)[:-1], 1]) for v in (x, y)]
    transposed = g.transpose(squares[1], [*axes[:-2], axes[-1], axes[-2]])
    total = g.Sub(g.Add(squares[0], transposed), g.Mul(cross, g.scalar(2, g.out.dtype)))
    return g.Sqrt(g.Max(total, g.scalar(0, g.out.dtype)))


@aten("_cdist_backward")
def cdist_backward(g: Builder, grad: Value, x: Value, y: Value, p: float, distances: Value) -> Value:
    slopes = _slopes(g, grad, _differences(g, x, y), p, distances)
    return g.ReduceSum(slopes, g.ints([-2]), keepdims=0)


def _slopes(g: Builder, grad: Value, difference: Value, p: float, distances: Value) -> Value:
    """Return the gradient of a distance by each coordinate of the difference, times the incoming gradient."""
    dtype = g.dtype(difference)
    zero = g.scalar(0, dtype)
    grad, distance = (g.unsqueeze(v, [-1]) for v in (grad, distances))
    sign, size = g.Sign(difference), g.Abs(difference)
    if p == 0:
        return g.Mul(difference, zero)
    if p == 1:
        return g.Mul(grad, sign)
    if math.isinf(p):
        return g.Where(g.Equal(size, distance), g.Mul(grad, sign), zero)
    differs = g.Not(g.Equal(distance, zero))
    if p < 2:  # a negative power of a zero difference would be infinite
        differs = g.And(differs, g.Not(g.Equal(size, zero)))
    power = g.scalar(p - 1, dtype)
    ratio = difference if p == 2 else g.Mul(sign, g.Pow(size, power))
    slope = g.Div(g.Mul(grad, ratio), distance if p == 2 else g.Pow(distance, power))
    return g.Where(differs, slope, zero)


@aten("_pdist_forward")
def pdist(g: Builder, x: Value, p: float = 2) -> Value:
    return _norm(g, g.Sub(*_pair_rows(g, x, _row_pairs(g, x))), p)


@aten("_pdist_backward")
def pdist_backward(g: Builder, grad: Value, x: Value, p: float, distances: Value) -> Value:
    pairs = _row_pairs(g, x)
    slopes = _slopes(g, grad, g.Sub(*_pair_rows(g, x, pairs)), p, distances)
    result = g.expand(g.scalar(0, g.dtype(x)), g.dims(x))
    for pair, part in zip(pairs, (slopes, g.Neg(slopes)), strict=True):
        result = scatter_combined(g, result, 0, g.expand(g.unsqueeze(pair, [1]), g.dims(slopes)), part, "add")
    return result


def _row_pairs(g: Builder, x: Value) -> tuple[Value, Value]:
    """Return the first and the second row index of every pair, in torch's order: above the diagonal."""
    count = g.dims(x)[0]
    many = g.dim(count * (count - 1) / 2) if not isinstance(count, int) else count * (count - 1) // 2
    square = g.expand(g.scalar(1, torch.int64), [count, count])
    coordinates = g.NonZero(g.Trilu(square, g.scalar(1, torch.int64), upper=1))
    first, second = (g.Gather(coordinates, g.scalar(row, torch.int64), axis=0) for row in (0, 1))
    return g.shaped(first, [many]), g.shaped(second, [many])


def _pair_rows(g: Builder, x: Value, pairs: tuple[Value, Value]) -> list[Value]:
    dims = [*g.dims(pairs[0]), g.dims(x)[1]]
    return [g.shaped(g.Gather(x, pair, axis=0), dims) for pair in pairs]
