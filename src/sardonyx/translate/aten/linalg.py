"""Linear algebra of small matrices, by elimination written out in double precision; larger ones stay in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.formula import Number, number, repeated
from sardonyx.translate.inference import broadcast
from sardonyx.translate.sizes import Dims
from sardonyx.translate.table import aten

Value = ir.Value
_LARGEST = 8


def _order(g: Builder, a: Value) -> int:
    size = g.dims(a)[-1]
    if not isinstance(size, int) or size > _LARGEST:
        raise Unsupported(f"a matrix of {size} rows; up to {_LARGEST} are written out")
    if 0 in g.dims(a):
        raise Unsupported("a matrix of no elements")
    return size


def _double(g: Builder, a: Value) -> Value:
    if g.dtype(a) != torch.float32:
        raise Unsupported("no formula that is exact in double precision")
    return g.cast(a, torch.float64)


def _turned(g: Builder, a: Value) -> Value:
    axes = list(range(g.rank(a)))
    return g.transpose(a, [*axes[:-2], axes[-1], axes[-2]])


def _part(g: Builder, a: Value, axis: int, start: int, end: int) -> Value:
    dims = list(g.dims(a))
    dims[axis] = end - start
    return g.shaped(g.slice(a, len(dims) + axis, start, end), dims)


def _beside(g: Builder, a: Value, b: Value) -> Value:
    return g.shaped(g.Concat(a, b, axis=-1), [*g.dims(a)[:-1], g.dims(a)[-1] + g.dims(b)[-1]])


def _identity(g: Builder, batch: Dims, size: int) -> Value:
    return g.expand(g.constant(torch.eye(size, dtype=torch.float64).numpy()), [*batch, size, size])


class _Elimination:
    """Gauss and Jordan's elimination of [A | B]: what is left of B is A⁻¹B."""

    def __init__(self, g: Builder, a: Value, b: Value | None = None) -> None:
        self.g, self.size = g, _order(g, a)
        self._rest = a if b is None else _beside(g, a, b)
        self._rows = g.reshape(g.ints(range(self.size)), [self.size, 1])
        self.pivots: list[Value] = []
        self.swapped: list[Value] = []
        for column in range(self.size):
            if column < self.size - 1:
                self._pivot(column)
            self._clear(column)

    def _pivot(self, column: int) -> None:
        """The largest element that is left in the column comes up."""
        g, rest = self.g, self._rest
        left = _part(g, _part(g, rest, -1, column, column + 1), -2, column, self.size)
        chosen = g.ArgMax(g.Abs(left), axis=g.rank(rest) - 2, keepdims=1)
        chosen = g.Add(g.shaped(chosen, [*g.dims(rest)[:-2], 1, 1]), g.scalar(column, torch.int64))
        here = g.scalar(column, torch.int64)
        order = g.Where(g.Equal(self._rows, chosen), here, self._rows)
        order = g.Where(g.Equal(self._rows, here), chosen, order)
        moved = g.GatherElements(rest, g.expand(order, g.dims(rest)), axis=g.rank(rest) - 2)
        self._rest = g.shaped(moved, g.dims(rest))
        self.swapped.append(g.Not(g.Equal(chosen, here)))

    def _clear(self, column: int) -> None:
        g, rest = self.g, self._rest
        row = _part(g, rest, -2, column, column + 1)
        pivot = _part(g, row, -1, column, column + 1)
        self.pivots.append(pivot)
        # A singular matrix has a zero among its pivots, and no NaN behind it.
        zero, one = (g.scalar(float(v), torch.float64) for v in (0, 1))
        scaled = g.Div(row, g.Where(g.Equal(pivot, zero), one, pivot))
        cleared = g.Sub(rest, g.Mul(_part(g, rest, -1, column, column + 1), scaled))
        self._rest = g.Where(g.Equal(self._rows, g.scalar(column, torch.int64)), scaled, cleared)

    def solution(self) -> Value:
        """A⁻¹B."""
        return _part(self.g, self._rest, -1, self.size, int(self.g.dims(self._rest)[-1]))

    def sign(self) -> Number:
        """Minus one where an odd number of rows was swapped."""
        g = self.g
        sign = Number(g, g.scalar(1.0, torch.float64))
        for swapped in self.swapped:
            sign = (-sign).where(swapped, sign)
        return sign

    def info(self) -> Value:
        """The number of the first pivot that is zero."""
        zero = self.g.scalar(0.0, torch.float64)
        return _first(self.g, [self.g.Equal(pivot, zero) for pivot in self.pivots])


def _of_nothing(g: Builder, *values: float) -> tuple[Value, ...]:
    """The results for matrices without elements, of those that have elements themselves."""
    return tuple(g.expand(g.scalar(v, out.dtype), g.like(out)) for v, out in zip(values, g.out, strict=True))


def _without_factors(g: Builder, *outputs: int) -> None:
    if any(map(g.reads_output, outputs)):
        raise Unsupported("the factors of the matrix, which a gradient needs")


@aten("_linalg_det")
def det(g: Builder, a: Value) -> tuple[Value, ...]:
    _without_factors(g, 1, 2)
    if 0 in g.dims(a):
        return _of_nothing(g, 1, 0, 0)
    done = _Elimination(g, _double(g, a))
    found = done.sign()
    for pivot in done.pivots:
        found = found * Number(g, pivot)
    return g.squeeze(found.value, [-1, -2]), a, a


@aten("_linalg_slogdet")
def slogdet(g: Builder, a: Value) -> tuple[Value, ...]:
    _without_factors(g, 2, 3)
    if 0 in g.dims(a):
        return _of_nothing(g, 1, 0, 0, 0)
    done = _Elimination(g, _double(g, a))
    sign, size = done.sign(), Number(g, g.scalar(0.0, torch.float64))
    for pivot in done.pivots:
        sign, size = sign * Number(g, g.Sign(pivot)), size + abs(Number(g, pivot)).log()
    return g.squeeze(sign.value, [-1, -2]), g.squeeze(size.value, [-1, -2]), a, a


@aten("linalg_inv_ex")
def inv_ex(g: Builder, a: Value, *, check_errors: bool = False) -> tuple[Value, ...]:
    if check_errors:
        raise Unsupported("an error for a singular matrix")
    if 0 in g.dims(a):
        return _of_nothing(g, 0, 0)
    wide = _double(g, a)
    done = _Elimination(g, wide, _identity(g, g.dims(wide)[:-2], _order(g, wide)))
    return done.solution(), done.info()


@aten("_linalg_solve_ex")
def solve_ex(g: Builder, a: Value, b: Value, *, left: bool = True, check_errors: bool = False) -> tuple[Value, ...]:
    if check_errors:
        raise Unsupported("an error for a singular matrix")
    _without_factors(g, 1, 2)
    if 0 in g.dims(a):
        return _of_nothing(g, 0, 0, 0, 0)
    vector = g.rank(b) == 1 or g.dims(b) == g.dims(a)[:-1]
    a, b = _double(g, a), _double(g, g.unsqueeze(b, [-1]) if vector else b)
    if not left:
        a, b = _turned(g, a), (b if vector else _turned(g, b))
    a, b = _of_one_batch(g, a, b)
    done = _Elimination(g, a, b)
    found = done.solution()
    if vector:
        found = g.squeeze(found, [-1])
    return found if left or vector else _turned(g, found), a, a, _of_each(g, done.info(), g.like(g.out[3]))


def _of_each(g: Builder, info: Value, dims: Dims) -> Value:
    """What was found for matrices that a batch shares, once."""
    shared = list(range(g.rank(info) - len(dims)))
    if g.dims(info)[len(shared) :] != dims:
        raise Unsupported("matrices that several right-hand sides share in part")
    return g.shaped(g.ReduceMax(info, g.ints(shared), keepdims=0), dims) if shared else info


def _of_one_batch(g: Builder, a: Value, b: Value) -> tuple[Value, Value]:
    batch = broadcast(g.dims(a)[:-2], g.dims(b)[:-2])
    return g.expand(a, [*batch, *g.dims(a)[-2:]]), g.expand(b, [*batch, *g.dims(b)[-2:]])


# Triangular matrices


def _substituted(g: Builder, a: Value, b: Value, upper: bool) -> Value:
    """A⁻¹B for a triangular matrix, row by row, from the corner that has one unknown."""
    a, b = _of_one_batch(g, a, b)
    size = _order(g, a)
    rows: dict[int, Value] = {}
    for i in reversed(range(size)) if upper else range(size):
        row, right = _part(g, a, -2, i, i + 1), _part(g, b, -2, i, i + 1)
        if rows:
            known = g.Concat(*(rows[j] for j in sorted(rows)), axis=-2)
            factors = _part(g, row, -1, i + 1, size) if upper else _part(g, row, -1, 0, i)
            right = g.Sub(right, g.shaped(g.MatMul(factors, known), g.dims(right)))
        rows[i] = g.Div(right, _part(g, row, -1, i, i + 1))
    return g.shaped(g.Concat(*(rows[i] for i in range(size)), axis=-2), g.dims(b))


def _with_unit_diagonal(g: Builder, a: Value) -> Value:
    eye = g.constant(torch.eye(_order(g, a), dtype=torch.bool).numpy())
    return g.Where(eye, g.scalar(1.0, torch.float64), a)


@aten("linalg_solve_triangular")
def solve_triangular(
    g: Builder, a: Value, b: Value, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Value:
    a, b = _double(g, a), _double(g, b)
    if unitriangular:
        a = _with_unit_diagonal(g, a)
    if left:
        return _substituted(g, a, b, upper)
    return _turned(g, _substituted(g, _turned(g, a), _turned(g, b), not upper))


@aten("triangular_solve")
def triangular_solve(
    g: Builder, b: Value, a: Value, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Value, ...]:
    if 0 in g.dims(a):
        return _of_nothing(g, 0, 0)
    wide = _double(g, a)
    if unitriangular:
        wide = _with_unit_diagonal(g, wide)
    found = _substituted(g, _turned(g, wide) if transpose else wide, _double(g, b), upper != transpose)
    return found, g.expand(a, g.like(g.out[1]))


@aten("cholesky_solve")
def cholesky_solve(g: Builder, b: Value, factor: Value, upper: bool = False) -> Value:
    """(L·Lᵀ)⁻¹B, by L and then by Lᵀ."""
    lower = _double(g, factor)
    lower = _turned(g, lower) if upper else lower
    return _substituted(g, _turned(g, lower), _substituted(g, lower, _double(g, b), upper=False), upper=True)


@aten("cholesky_inverse")
def cholesky_inverse(g: Builder, factor: Value, upper: bool = False) -> Value:
    lower = _double(g, factor)
    lower = _turned(g, lower) if upper else lower
    half = _substituted(g, lower, _identity(g, (), _order(g, lower)), upper=False)
    return g.MatMul(_turned(g, half), half)


@aten("linalg_cholesky_ex")
def cholesky_ex(g: Builder, a: Value, *, upper: bool = False, check_errors: bool = False) -> tuple[Value, ...]:
    """Column by column: its root is divided out, and what it explains is taken off the rest."""
    if check_errors:
        raise Unsupported("an error for a matrix that is not positive-definite")
    if 0 in g.dims(a):
        return _of_nothing(g, 0, 0)
    size = _order(g, a)
    rest = _turned(g, _double(g, a)) if upper else _double(g, a)
    columns, roots = [], []
    for k in range(size):
        column = _part(g, _part(g, rest, -1, k, k + 1), -2, k, size)
        roots.append(_part(g, column, -2, 0, 1))
        column = g.Div(column, g.Sqrt(roots[-1]))
        if k:
            above = g.expand(g.scalar(0.0, torch.float64), [*g.dims(rest)[:-2], k, 1])
            column = g.Concat(above, column, axis=-2)
        columns.append(g.shaped(column, [*g.dims(rest)[:-1], 1]))
        rest = g.Sub(rest, g.Mul(columns[-1], _turned(g, columns[-1])))
    lower = g.shaped(g.Concat(*columns, axis=-1), g.dims(rest))
    return _turned(g, lower) if upper else lower, _first(g, [g.Not(_positive(g, root)) for root in roots])


def _positive(g: Builder, x: Value) -> Value:
    return g.Greater(x, g.scalar(0.0, torch.float64))


def _first(g: Builder, failed: Sequence[Value]) -> Value:
    """The number of the first step that failed, counted from one; zero where none did."""
    found = g.scalar(0, torch.int64)
    for index, failure in reversed(list(enumerate(failed, 1))):
        found = g.Where(failure, g.scalar(index, torch.int64), found)
    return g.squeeze(found, [-1, -2])


# The exponential

_TAYLOR = 12


@aten("linalg_matrix_exp")
def matrix_exp(g: Builder, a: Value) -> Value:
    """Taylor's series of A/2ˢ, whose norm is at most ½, squared s times."""
    if g.out.dtype in (torch.float16, torch.bfloat16):
        raise Unsupported("half precision, in which torch's own result overflows")
    whole = number(g, a)
    dims = g.dims(a)
    if not isinstance(dims[-1], int):
        raise Unsupported("matrices of a symbolic size")
    rows = g.ReduceSum(abs(whole).value, g.ints([-1]), keepdims=1)
    norm = Number(g, g.shaped(g.ReduceMax(rows, g.ints([-2]), keepdims=1), [*dims[:-2], 1, 1]))
    halvings = ((norm.log() / math.log(2)).apply("Ceil") + 1).at_least(0)
    halvings = halvings.where(norm < math.inf, 0)  # else there is no number to find
    eye = Number(g, _identity(g, (), dims[-1]))
    scaled = whole / whole.like(2) ** halvings
    total = scaled / _TAYLOR + eye
    for k in reversed(range(1, _TAYLOR)):
        total = _product(scaled, total, dims) / k + eye
    rounds = g.cast(g.ReduceMax(halvings.value, keepdims=0), torch.int64)

    def squared(k: Number, state: Sequence[Number]) -> list[Number]:
        return [_product(state[0], state[0], dims).where(k < halvings, state[0])]

    return repeated(rounds, [total], squared)[0].value


def _product(a: Number, b: Number, dims: Dims) -> Number:
    return Number(a.g, a.g.shaped(a.g.MatMul(a.value, b.value), dims))
