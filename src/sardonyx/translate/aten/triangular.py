"""Triangular systems, by substitution in double precision: rows within a block, then blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.translate.aten.factors import filled, identity, slice_axis, transposed
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_BLOCK = 8
_LARGEST = 256
"""The largest number of rows; each block of them takes a few nodes."""


def in_double(g: Builder, a: Value) -> Value:
    """Cast a matrix of single or double precision to double: substitution rounds no worse than LAPACK's."""
    if g.dtype(a) not in (torch.float32, torch.float64):
        raise Unsupported("no formula for matrices of this dtype")
    return g.cast(a, torch.float64)


def row_count(g: Builder, a: Value) -> int:
    """Return the number of rows of square matrices that are small enough."""
    rows = g.dims(a)[-2]
    if not isinstance(rows, int) or rows > _LARGEST:
        raise Unsupported(f"a matrix of {rows} rows; up to {_LARGEST} are written out")
    return rows


def broadcast_batch(g: Builder, a: Value, b: Value) -> tuple[Value, Value]:
    """Broadcast the batch dimensions of matrices and right-hand sides."""
    batch = g.broadcast(a, b, without=2)
    return g.expand(a, [*batch, *g.dims(a)[-2:]]), g.expand(b, [*batch, *g.dims(b)[-2:]])


def solve_triangle(g: Builder, a: Value, b: Value, upper: bool, unit: bool = False) -> Value:
    """Return A⁻¹B for a triangular matrix, with ones on its diagonal if `unit`."""
    a, b = broadcast_batch(g, a, b)
    if row_count(g, a) <= _BLOCK:
        return _by_rows(g, a, b, upper, unit)
    return _by_blocks(g, a, b, upper, unit)


def _by_rows(g: Builder, a: Value, b: Value, upper: bool, unit: bool) -> Value:
    """Solve row by row from the row with one unknown."""
    size = row_count(g, a)
    rows: dict[int, Value] = {}
    for i in reversed(range(size)) if upper else range(size):
        row, right = slice_axis(g, a, -2, i, i + 1), slice_axis(g, b, -2, i, i + 1)
        if rows:
            factors = slice_axis(g, row, -1, i + 1, size) if upper else slice_axis(g, row, -1, 0, i)
            right = _subtract_known(g, right, factors, _stacked(g, rows))
        rows[i] = right if unit else g.Div(right, slice_axis(g, row, -1, i, i + 1))
    return g.shaped(_stacked(g, rows), g.dims(b))


def _by_blocks(g: Builder, a: Value, b: Value, upper: bool, unit: bool) -> Value:
    """Solve block by block, with the inverses of the diagonal blocks, which are computed together."""
    dims, rows = g.dims(b), row_count(g, a)
    a, b = _pad_to_blocks(g, a, b)
    size = row_count(g, a)
    inverses = _invert_blocks(g, a, upper, unit)
    blocks: dict[int, Value] = {}
    for i in reversed(range(size // _BLOCK)) if upper else range(size // _BLOCK):
        start, end = i * _BLOCK, (i + 1) * _BLOCK
        right = slice_axis(g, b, -2, start, end)
        if blocks:
            factors = slice_axis(g, slice_axis(g, a, -2, start, end), -1, end if upper else 0, size if upper else start)
            right = _subtract_known(g, right, factors, _stacked(g, blocks))
        inverse = g.squeeze(slice_axis(g, inverses, -3, i, i + 1), [-3])
        blocks[i] = g.shaped(g.MatMul(inverse, right), g.dims(right))
    solved = g.shaped(_stacked(g, blocks), g.dims(b))
    return g.shaped(slice_axis(g, solved, -2, 0, rows), dims)


def _stacked(g: Builder, solved: dict[int, Value]) -> Value:
    return g.Concat(*(solved[i] for i in sorted(solved)), axis=-2) if len(solved) > 1 else next(iter(solved.values()))


def _subtract_known(g: Builder, right: Value, factors: Value, known: Value) -> Value:
    """Subtract the solved unknowns from the right-hand side."""
    return g.Sub(right, g.shaped(g.MatMul(factors, known), g.dims(right)))


def _pad_to_blocks(g: Builder, a: Value, b: Value) -> tuple[Value, Value]:
    """Pad rows to a whole block, with those of the identity and zeros."""
    rows = row_count(g, a)
    more = -rows % _BLOCK
    if not more:
        return a, b
    batch, size = g.dims(a)[:-2], rows + more
    zero, axes = g.scalar(0.0, torch.float64), [g.rank(a) - 2, g.rank(a) - 1]
    a = g.shaped(g.Pad(a, g.ints([0, 0, more, more]), zero, g.ints(axes)), [*batch, size, size])
    b = g.shaped(g.Pad(b, g.ints([0, more]), zero, g.ints(axes[:1])), [*batch, size, g.dims(b)[-1]])
    return g.Add(a, g.constant(np.diag([0.0] * rows + [1.0] * more))), b


def _invert_blocks(g: Builder, a: Value, upper: bool, unit: bool) -> Value:
    """Return the inverses of the diagonal blocks, along a new axis."""
    batch, size = g.dims(a)[:-2], row_count(g, a)
    corners = np.arange(0, size, _BLOCK).reshape(-1, 1, 1) * (size + 1)
    i, j = np.ogrid[:_BLOCK, :_BLOCK]
    elements = g.reshape(a, [*batch, size * size])
    blocks = g.Gather(elements, g.constant(corners + i * size + j), axis=len(batch))
    dims = (*batch, size // _BLOCK, _BLOCK, _BLOCK)
    return _by_rows(g, g.shaped(blocks, dims), identity(g, dims[:-2], _BLOCK), upper, unit)


@aten("linalg_solve_triangular")
def solve_triangular(
    g: Builder, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Value:
    if 0 in g.like(g.out):
        return filled(g, g.out)
    a, b = in_double(g, a), in_double(g, b)
    if left:
        return solve_triangle(g, a, b, upper, unitriangular)
    return transposed(g, solve_triangle(g, transposed(g, a), transposed(g, b), not upper, unitriangular))


@aten("triangular_solve")
def triangular_solve(
    g: Builder, b: Value, a: Value, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Value, ...]:
    if 0 in g.like(g.out[0]):
        return filled(g, g.out[0]), g.expand(a, g.like(g.out[1]))
    matrix = transposed(g, in_double(g, a)) if transpose else in_double(g, a)
    solution = solve_triangle(g, matrix, in_double(g, b), upper != transpose, unitriangular)
    return solution, g.expand(a, g.like(g.out[1]))


@aten("cholesky_solve")
def cholesky_solve(g: Builder, b: Value, factor: Value, upper: bool = False) -> Value:
    """(L·Lᵀ)⁻¹B, by L and then by Lᵀ."""
    if 0 in g.like(g.out):
        return filled(g, g.out)
    lower = _lower(g, factor, upper)
    return solve_triangle(g, transposed(g, lower), solve_triangle(g, lower, in_double(g, b), upper=False), upper=True)


@aten("cholesky_inverse")
def cholesky_inverse(g: Builder, factor: Value, upper: bool = False) -> Value:
    if 0 in g.like(g.out):
        return filled(g, g.out)
    lower = _lower(g, factor, upper)
    half = solve_triangle(g, lower, identity(g, (), row_count(g, lower)), upper=False)
    return g.MatMul(transposed(g, half), half)


def _lower(g: Builder, factor: Value, upper: bool) -> Value:
    return transposed(g, in_double(g, factor)) if upper else in_double(g, factor)
