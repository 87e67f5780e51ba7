"""LU, Cholesky and QR factorizations of small matrices, unrolled; larger ones stay in torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dims
from sardonyx.translate.builder import Builder
from sardonyx.translate.formula import Number
from sardonyx.translate.table import aten

Value = ir.Value
_LARGEST = 8


def matrix_sizes(g: Builder, a: Value) -> tuple[int, int]:
    """Return the rows and columns of matrices that are small enough."""
    rows, columns = g.dims(a)[-2:]
    for count, kind in ((rows, "rows"), (columns, "columns")):
        if not isinstance(count, int) or count > _LARGEST:
            raise Unsupported(f"a matrix of {count} {kind}; up to {_LARGEST} are written out")
    if 0 in g.dims(a):
        raise Unsupported("an empty matrix")
    return int(rows), int(columns)


def _single(g: Builder, a: Value) -> Value:
    """Return a matrix of single precision; there is no formula for others."""
    if g.dtype(a) != torch.float32:
        raise Unsupported("no formula that is accurate in double precision")
    return a


def to_double(g: Builder, a: Value) -> Value:
    """Cast single precision to double, which has digits to spare."""
    return g.cast(_single(g, a), torch.float64)


def transposed(g: Builder, a: Value) -> Value:
    axes = list(range(g.rank(a)))
    return g.transpose(a, [*axes[:-2], axes[-1], axes[-2]])


def slice_axis(g: Builder, a: Value, axis: int, start: int, end: int) -> Value:
    """Slice rows (-2) or columns (-1); without a node for all of them."""
    dims = list(g.dims(a))
    if (start, end) == (0, dims[axis]):
        return a
    dims[axis] = end - start
    return g.shaped(g.slice(a, len(dims) + axis, start, end), dims)


def _element(g: Builder, a: Value, row: int, column: int) -> Value:
    return slice_axis(g, slice_axis(g, a, -2, row, row + 1), -1, column, column + 1)


def _concat(g: Builder, parts: Sequence[Value], axis: int) -> Value:
    dims = list(g.dims(parts[0]))
    dims[axis] = sum(int(g.dims(p)[axis]) for p in parts)
    return g.shaped(g.Concat(*parts, axis=axis), dims) if len(parts) > 1 else parts[0]


def _zeros(g: Builder, dims: Dims) -> Value:
    return g.expand(g.scalar(0.0, torch.float64), dims)


def identity(g: Builder, batch: Dims, rows: int, columns: int | None = None) -> Value:
    """Return ones on the diagonal, for each matrix of a batch."""
    eye = np.eye(rows, columns)
    return g.expand(g.constant(eye), [*batch, *eye.shape])


def on_empty(g: Builder, *values: float) -> tuple[Value, ...]:
    """Return the results for empty matrices that are not empty themselves."""
    return tuple(filled(g, out, v) for v, out in zip(values, g.out, strict=True))


def filled(g: Builder, out: torch.Tensor, value: float = 0) -> Value:
    return g.expand(g.scalar(value, out.dtype), g.like(out))


def _first_failure(g: Builder, failed: Sequence[Value]) -> Value:
    """Return the number of the first step that failed, counted from one; zero if none did."""
    number = g.scalar(0, torch.int64)
    for index, failure in reversed(list(enumerate(failed, 1))):
        number = g.Where(failure, g.scalar(index, torch.int64), number)
    return g.squeeze(number, [-1, -2])


def _upper(g: Builder, a: Value) -> Value:
    return g.Trilu(a, upper=1)


def _unit_lower(g: Builder, a: Value) -> Value:
    """Return the part below the diagonal, and ones on it."""
    below = g.Trilu(a, g.scalar(-1, torch.int64), upper=0)
    return g.Add(below, g.cast(identity(g, (), *matrix_sizes(g, a)), g.dtype(a)))


# LU


class Lu:
    """Gaussian elimination with partial pivoting: U, and L below its diagonal.

    In single precision it rounds as LAPACK does, so that it selects the same pivots in ties.
    """

    def __init__(self, g: Builder, a: Value) -> None:
        self.g, self.packed = g, a
        self._rows, self._columns = matrix_sizes(g, a)
        self._chosen: list[Value] = []
        self._exchanges: list[Value] = []
        for k in range(min(self._rows, self._columns)):
            self._pivot(k)
            if k < self._rows - 1:
                self._clear(k)

    def _pivot(self, k: int) -> None:
        """Swap up the row with the first of the largest remaining elements in the column."""
        g, rest = self.g, self.packed
        if k == self._rows - 1:
            self._chosen.append(g.expand(g.scalar(k, torch.int64), [*g.dims(rest)[:-2], 1, 1]))
            return
        left = slice_axis(g, slice_axis(g, rest, -1, k, k + 1), -2, k, self._rows)
        chosen = g.ArgMax(g.Abs(left), axis=g.rank(rest) - 2, keepdims=1)
        chosen = g.Add(g.shaped(chosen, [*g.dims(rest)[:-2], 1, 1]), g.scalar(k, torch.int64))
        self._chosen.append(chosen)
        self._exchanges.append(_swap_rows(g, self._rows, k, chosen))
        self.packed = _gather_rows(g, rest, self._exchanges[-1])

    def _clear(self, k: int) -> None:
        g, rest = self.g, self.packed
        row, column = slice_axis(g, rest, -2, k, k + 1), slice_axis(g, rest, -1, k, k + 1)
        pivot = slice_axis(g, row, -1, k, k + 1)
        # If the pivot is zero, all elements below it are too, and nothing is to clear.
        zero, one = (g.scalar(float(v), g.dtype(rest)) for v in (0, 1))
        factors = _divide(g, column, g.Where(g.Equal(pivot, zero), one, pivot))
        i, j = np.ogrid[: self._rows, : self._columns]
        cleared = g.Where(g.constant((i > k) & (j > k)), g.Sub(rest, g.Mul(factors, row)), rest)
        self.packed = g.Where(g.constant((i > k) & (j == k)), factors, cleared)

    def diagonal(self) -> list[Number]:
        """U's."""
        return [Number(self.g, _element(self.g, self.packed, k, k)) for k in range(len(self._chosen))]

    def pivots(self) -> Value:
        """Return the row that each step swapped with its own, counted from one."""
        chosen = self.g.squeeze(_concat(self.g, self._chosen, -2), [-1])
        return self.g.Add(chosen, self.g.scalar(1, torch.int64))

    def order(self) -> Value:
        """Return the row of the matrix that each row of LU is."""
        return reduce(partial(_gather_rows, self.g), self._exchanges or [_row_indices(self.g, self._rows)])

    def sign(self) -> Number:
        """Return minus one if the number of row swaps is odd."""
        g = self.g
        sign = Number(g, g.scalar(1.0, torch.float64))
        for k, chosen in enumerate(self._chosen[: self._rows - 1]):
            sign = sign.where(g.Equal(chosen, g.scalar(k, torch.int64)), -sign)
        return sign

    def info(self) -> Value:
        """Return the number of the first pivot that is zero in the precision of the result."""
        g, zero = self.g, self.g.scalar(0.0, torch.float32)
        return _first_failure(g, [g.Equal(g.cast(pivot.value, torch.float32), zero) for pivot in self.diagonal()])


def _divide(g: Builder, x: Value, y: Value) -> Value:
    """x/y; in single precision by the reciprocal, if it exists, as LAPACK does."""
    exact = g.Div(x, y)
    if g.dtype(x) == torch.float64:
        return exact
    tiny = g.Less(g.Abs(y), g.scalar(torch.finfo(torch.float32).tiny, torch.float32))
    return g.Where(tiny, exact, g.Mul(x, g.Div(g.scalar(1.0, torch.float32), y)))


def _row_indices(g: Builder, rows: int) -> Value:
    return g.reshape(g.ints(range(rows)), [rows, 1])


def _swap_rows(g: Builder, rows: int, k: int, chosen: Value) -> Value:
    numbers, here = _row_indices(g, rows), g.scalar(k, torch.int64)
    order = g.Where(g.Equal(numbers, chosen), here, numbers)
    return g.Where(g.Equal(numbers, here), chosen, order)


def _gather_rows(g: Builder, a: Value, order: Value) -> Value:
    moved = g.GatherElements(a, g.expand(order, g.dims(a)), axis=g.rank(a) - 2)
    return g.shaped(moved, g.dims(a))


def row_order(g: Builder, pivots: Value, rows: int) -> Value:
    """Return the row of PLU that each row of LU is, from torch's pivots."""
    chosen = g.Sub(g.unsqueeze(g.cast(pivots, torch.int64), [-1]), g.scalar(1, torch.int64))
    steps = range(int(g.dims(chosen)[-2]))
    exchanges = [_swap_rows(g, rows, k, slice_axis(g, chosen, -2, k, k + 1)) for k in steps]
    return reduce(partial(_gather_rows, g), exchanges)


def _permutation(g: Builder, order: Value, rows: int) -> Value:
    """Return P: in each column, a one in the row that the pivots moved there."""
    ones = g.Equal(_row_indices(g, rows), transposed(g, order))
    return g.expand(g.cast(ones, g.out[0].dtype), g.like(g.out[0]))


def _unpack(g: Builder, packed: Value) -> tuple[Value, Value]:
    rank = min(matrix_sizes(g, packed))
    return _unit_lower(g, slice_axis(g, packed, -1, 0, rank)), _upper(g, slice_axis(g, packed, -2, 0, rank))


def _refuse_no_pivoting(pivot: bool) -> None:
    if not pivot:
        raise Unsupported("factors without pivoting, which torch supports on some devices only")


@aten("linalg_lu_factor_ex")
def lu_factor_ex(g: Builder, a: Value, *, pivot: bool = True, check_errors: bool = False) -> tuple[Value, ...]:
    _refuse_no_pivoting(pivot)
    if check_errors:
        raise Unsupported("an error for a singular matrix")
    if 0 in g.dims(a):
        return on_empty(g, 0, 0, 0)
    lu = Lu(g, _single(g, a))
    return lu.packed, lu.pivots(), lu.info()


@aten("linalg_lu")
def lu(g: Builder, a: Value, *, pivot: bool = True) -> tuple[Value, ...]:
    _refuse_no_pivoting(pivot)
    if 0 in g.dims(a):
        return _empty_plu(g)
    done = Lu(g, _single(g, a))
    return _permutation(g, done.order(), matrix_sizes(g, a)[0]), *_unpack(g, done.packed)


@aten("lu_unpack")
def lu_unpack(
    g: Builder, packed: Value, pivots: Value, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Value, ...]:
    if 0 in g.dims(packed):
        return _empty_plu(g) if unpack_pivots else on_empty(g, 0, 0, 0)
    rows, _ = matrix_sizes(g, packed)
    p = _permutation(g, row_order(g, pivots, rows), rows) if unpack_pivots else filled(g, g.out[0])
    if not unpack_data:
        return p, filled(g, g.out[1]), filled(g, g.out[2])
    return p, *_unpack(g, packed)


def _empty_plu(g: Builder) -> tuple[Value, ...]:
    return _identity_like(g, g.out[0]), filled(g, g.out[1]), filled(g, g.out[2])


def _identity_like(g: Builder, out: torch.Tensor) -> Value:
    *batch, rows, _ = g.like(out)
    if not isinstance(rows, int):
        raise Unsupported("matrices of a symbolic size")
    return identity(g, tuple(batch), rows)


# Cholesky's


@aten("linalg_cholesky_ex")
def cholesky_ex(g: Builder, a: Value, *, upper: bool = False, check_errors: bool = False) -> tuple[Value, ...]:
    """Compute column by column: divide by the root of the pivot, and subtract the outer product from the rest."""
    if check_errors:
        raise Unsupported("an error for a matrix that is not positive-definite")
    if 0 in g.dims(a):
        return on_empty(g, 0, 0)
    size, _ = matrix_sizes(g, a)
    rest = transposed(g, to_double(g, a)) if upper else to_double(g, a)
    columns, roots = [], []
    for k in range(size):
        column = slice_axis(g, slice_axis(g, rest, -1, k, k + 1), -2, k, size)
        roots.append(slice_axis(g, column, -2, 0, 1))
        column = g.Div(column, g.Sqrt(roots[-1]))
        if k:
            above = g.expand(g.scalar(0.0, torch.float64), [*g.dims(rest)[:-2], k, 1])
            column = g.Concat(above, column, axis=-2)
        columns.append(g.shaped(column, [*g.dims(rest)[:-1], 1]))
        rest = g.Sub(rest, g.Mul(columns[-1], transposed(g, columns[-1])))
    lower = g.shaped(g.Concat(*columns, axis=-1), g.dims(rest))
    return transposed(g, lower) if upper else lower, _first_failure(g, [g.Not(_positive(g, root)) for root in roots])


def _positive(g: Builder, x: Value) -> Value:
    return g.Greater(x, g.scalar(0.0, torch.float64))


# QR


def _reflector(g: Builder, column: Value) -> tuple[Value, Value]:
    """Return v below its leading one, and τ: I - τvvᵀ clears the column below its first element."""
    size = int(g.dims(column)[-2])
    alpha = Number(g, slice_axis(g, column, -2, 0, 1))
    below = Number(g, slice_axis(g, column, -2, 1, size))
    rest = Number(g, g.ReduceSum((below * below).value, g.ints([-2]), keepdims=1))
    rest = Number(g, g.shaped(rest.value, g.dims(alpha.value)))
    none = rest.equals(0)
    norm = (alpha * alpha + rest).sqrt()
    beta = norm.where(alpha < 0, -norm)
    tau = alpha.like(0).where(none, (beta - alpha) / beta.like(1).where(none, beta))
    return (below / alpha.like(1).where(none, alpha - beta)).value, tau.value


def _reflect(g: Builder, v: Value, tau: Value, x: Value) -> Value:
    """x - τ·v·vᵀx."""
    along = g.MatMul(transposed(g, v), x)
    along = g.shaped(along, [*g.dims(x)[:-2], 1, g.dims(x)[-1]])
    return g.Sub(x, g.Mul(v, g.Mul(tau, along)))


class _Qr:
    """Householder reflections as LAPACK chooses them: R, and the vectors and factors of the reflections."""

    def __init__(self, g: Builder, a: Value) -> None:
        rows, columns = matrix_sizes(g, a)
        batch = g.dims(a)[:-2]
        one = g.expand(g.scalar(1.0, torch.float64), [*batch, 1, 1])
        vectors, taus, rest = [], [], a
        for k in range(min(rows, columns)):
            above = [_zeros(g, (*batch, k, 1))] if k else []
            if k == rows - 1:  # a single element remains, unchanged
                vectors.append(_concat(g, [*above, one], -2))
                taus.append(_zeros(g, (*batch, 1, 1)))
                continue
            below, tau = _reflector(g, slice_axis(g, slice_axis(g, rest, -1, k, k + 1), -2, k, rows))
            vectors.append(_concat(g, [*above, one, below], -2))
            taus.append(tau)
            rest = _reflect(g, vectors[-1], tau, rest)
        self.triangle = _upper(g, rest)
        self.vectors, self.taus = _concat(g, vectors, -1), _concat(g, taus, -2)


def _apply_reflections(g: Builder, vectors: Value, taus: Value, x: Value, transpose: bool = False) -> Value:
    """Return Qx or Qᵀx by applying the reflections in turn."""
    steps = range(int(g.dims(taus)[-2]))
    for k in steps if transpose else reversed(steps):
        x = _reflect(g, slice_axis(g, vectors, -1, k, k + 1), slice_axis(g, taus, -2, k, k + 1), x)
    return x


@aten("geqrf")
def geqrf(g: Builder, a: Value) -> tuple[Value, ...]:
    if 0 in g.dims(a):
        return on_empty(g, 0, 0)
    done = _Qr(g, to_double(g, a))
    rows, columns = matrix_sizes(g, a)
    below = g.Trilu(done.vectors, g.scalar(-1, torch.int64), upper=0)
    if columns > rows:
        below = _concat(g, [below, _zeros(g, (*g.dims(a)[:-1], columns - rows))], -1)
    return g.Add(done.triangle, below), g.squeeze(done.taus, [-1])


@aten("linalg_qr")
def qr(g: Builder, a: Value, mode: str = "reduced") -> tuple[Value, ...]:
    if 0 in g.dims(a):
        q, r = g.out
        return _identity_like(g, q) if mode == "complete" else filled(g, q), filled(g, r)
    done = _Qr(g, to_double(g, a))
    rows, columns = matrix_sizes(g, a)
    count = rows if mode == "complete" else min(rows, columns)
    triangle = slice_axis(g, done.triangle, -2, 0, count)
    if mode == "r":
        return filled(g, g.out[0]), triangle
    return _apply_reflections(g, done.vectors, done.taus, identity(g, g.dims(a)[:-2], rows, count)), triangle


def _reflections(g: Builder, a: Value, taus: Value) -> tuple[Value, Value]:
    """Return the vectors and factors of geqrf's reflections."""
    wide = to_double(g, a)
    vectors = slice_axis(g, wide, -1, 0, min(matrix_sizes(g, wide)))
    return _unit_lower(g, vectors), g.unsqueeze(to_double(g, taus), [-1])


@aten("linalg_householder_product")
def householder_product(g: Builder, a: Value, tau: Value) -> Value:
    """Return the leading columns of Q, as many as the matrix has."""
    if 0 in g.like(g.out):
        return filled(g, g.out)
    rows, columns = matrix_sizes(g, a)
    eye = identity(g, g.dims(a)[:-2], rows, columns)
    return eye if 0 in g.dims(tau) else _apply_reflections(g, *_reflections(g, a, tau), eye)


@aten("ormqr")
def ormqr(g: Builder, a: Value, tau: Value, x: Value, left: bool = True, transpose: bool = False) -> Value:
    """Qx, or xQ as (Qᵀxᵀ)ᵀ."""
    if 0 in g.dims(tau) or 0 in g.dims(x):
        return x
    vectors, taus = _reflections(g, a, tau)
    x = to_double(g, x)
    if left:
        return _apply_reflections(g, vectors, taus, x, transpose)
    return transposed(g, _apply_reflections(g, vectors, taus, transposed(g, x), not transpose))
