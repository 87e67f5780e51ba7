"""Equations with triangular matrices, by substitution in double precision: rows within a block, then blocks."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.translate.aten.factors import filled, identity, part, turned
from sardonyx.translate.builder import Builder
from sardonyx.translate.inference import broadcast
from sardonyx.translate.table import aten

Value = ir.Value
_BLOCK = 8
_LARGEST = 256
"""Rows of the largest matrices that are written out, a few nodes for each block of them."""


def wide(g: Builder, a: Value) -> Value:
    """A matrix of single or double precision in double precision: substitution rounds no worse than LAPACK's."""
    if g.dtype(a) not in (torch.float32, torch.float64):
        raise Unsupported("no formula for matrices of this dtype")
    return g.cast(a, torch.float64)


def rows_of(g: Builder, a: Value) -> int:
    """The number of rows of square matrices that are small enough."""
    rows = g.dims(a)[-2]
    if not isinstance(rows, int) or rows > _LARGEST:
        raise Unsupported(f"a matrix of {rows} rows; up to {_LARGEST} are written out")
    return rows


def of_one_batch(g: Builder, a: Value, b: Value) -> tuple[Value, Value]:
    """Matrices and right-hand sides, their leading axes broadcast."""
    batch = broadcast(g.dims(a)[:-2], g.dims(b)[:-2])
    return g.expand(a, [*batch, *g.dims(a)[-2:]]), g.expand(b, [*batch, *g.dims(b)[-2:]])


def substituted(g: Builder, a: Value, b: Value, upper: bool, unit: bool = False) -> Value:
    """A⁻¹B for a triangular matrix, `unit` if its diagonal is one."""
    a, b = of_one_batch(g, a, b)
    if rows_of(g, a) <= _BLOCK:
        return _by_rows(g, a, b, upper, unit)
    return _by_blocks(g, a, b, upper, unit)


def _by_rows(g: Builder, a: Value, b: Value, upper: bool, unit: bool) -> Value:
    """Row by row from the corner that has one unknown."""
    size = rows_of(g, a)
    rows: dict[int, Value] = {}
    for i in reversed(range(size)) if upper else range(size):
        row, right = part(g, a, -2, i, i + 1), part(g, b, -2, i, i + 1)
        if rows:
            factors = part(g, row, -1, i + 1, size) if upper else part(g, row, -1, 0, i)
            right = _without(g, right, factors, _stacked(g, rows))
        rows[i] = right if unit else g.Div(right, part(g, row, -1, i, i + 1))
    return g.shaped(_stacked(g, rows), g.dims(b))


def _by_blocks(g: Builder, a: Value, b: Value, upper: bool, unit: bool) -> Value:
    """Block by block, with the inverses of the blocks on the diagonal: all of them are found at once."""
    dims, rows = g.dims(b), rows_of(g, a)
    a, b = _padded(g, a, b)
    size = rows_of(g, a)
    inverses = _inverted_blocks(g, a, upper, unit)
    blocks: dict[int, Value] = {}
    for i in reversed(range(size // _BLOCK)) if upper else range(size // _BLOCK):
        start, end = i * _BLOCK, (i + 1) * _BLOCK
        right = part(g, b, -2, start, end)
        if blocks:
            factors = part(g, part(g, a, -2, start, end), -1, end if upper else 0, size if upper else start)
            right = _without(g, right, factors, _stacked(g, blocks))
        inverse = g.squeeze(part(g, inverses, -3, i, i + 1), [-3])
        blocks[i] = g.shaped(g.MatMul(inverse, right), g.dims(right))
    solved = g.shaped(_stacked(g, blocks), g.dims(b))
    return g.shaped(part(g, solved, -2, 0, rows), dims)


def _stacked(g: Builder, solved: dict[int, Value]) -> Value:
    return g.Concat(*(solved[i] for i in sorted(solved)), axis=-2) if len(solved) > 1 else next(iter(solved.values()))


def _without(g: Builder, right: Value, factors: Value, known: Value) -> Value:
    """The right-hand side less what is known of the left."""
    return g.Sub(right, g.shaped(g.MatMul(factors, known), g.dims(right)))


def _padded(g: Builder, a: Value, b: Value) -> tuple[Value, Value]:
    """Rows up to a whole block, as those of the identity and of zeros."""
    rows = rows_of(g, a)
    more = -rows % _BLOCK
    if not more:
        return a, b
    batch, size = g.dims(a)[:-2], rows + more
    zero, axes = g.scalar(0.0, torch.float64), [g.rank(a) - 2, g.rank(a) - 1]
    a = g.shaped(g.Pad(a, g.ints([0, 0, more, more]), zero, g.ints(axes)), [*batch, size, size])
    b = g.shaped(g.Pad(b, g.ints([0, more]), zero, g.ints(axes[:1])), [*batch, size, g.dims(b)[-1]])
    return g.Add(a, g.constant(np.diag([0.0] * rows + [1.0] * more))), b


def _inverted_blocks(g: Builder, a: Value, upper: bool, unit: bool) -> Value:
    """The inverses of the blocks on the diagonal, along an axis of their own."""
    batch, size = g.dims(a)[:-2], rows_of(g, a)
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
    a, b = wide(g, a), wide(g, b)
    if left:
        return substituted(g, a, b, upper, unitriangular)
    return turned(g, substituted(g, turned(g, a), turned(g, b), not upper, unitriangular))


@aten("triangular_solve")
def triangular_solve(
    g: Builder, b: Value, a: Value, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Value, ...]:
    if 0 in g.like(g.out[0]):
        return filled(g, g.out[0]), g.expand(a, g.like(g.out[1]))
    matrix = turned(g, wide(g, a)) if transpose else wide(g, a)
    found = substituted(g, matrix, wide(g, b), upper != transpose, unitriangular)
    return found, g.expand(a, g.like(g.out[1]))


@aten("cholesky_solve")
def cholesky_solve(g: Builder, b: Value, factor: Value, upper: bool = False) -> Value:
    """(L·Lᵀ)⁻¹B, by L and then by Lᵀ."""
    if 0 in g.like(g.out):
        return filled(g, g.out)
    lower = _lower(g, factor, upper)
    return substituted(g, turned(g, lower), substituted(g, lower, wide(g, b), upper=False), upper=True)


@aten("cholesky_inverse")
def cholesky_inverse(g: Builder, factor: Value, upper: bool = False) -> Value:
    if 0 in g.like(g.out):
        return filled(g, g.out)
    lower = _lower(g, factor, upper)
    half = substituted(g, lower, identity(g, (), rows_of(g, lower)), upper=False)
    return g.MatMul(turned(g, half), half)


def _lower(g: Builder, factor: Value, upper: bool) -> Value:
    return turned(g, wide(g, factor)) if upper else wide(g, factor)
