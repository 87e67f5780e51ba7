"""Linear systems and functions of small matrices, by factorizations in double precision; larger ones stay in torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dims
from sardonyx.translate.aten.factors import (
    Lu,
    filled,
    identity,
    matrix_sizes,
    on_empty,
    row_order,
    to_double,
    transposed,
)
from sardonyx.translate.aten.triangular import broadcast_batch, in_double, row_count, solve_triangle
from sardonyx.translate.builder import Builder
from sardonyx.translate.formula import Number, loop_numbers, number
from sardonyx.translate.table import aten

Value = ir.Value


def _lu_for_determinant(g: Builder, a: Value) -> Lu:
    """Factorize. Torch uses the transposed matrix if that is contiguous in LAPACK's column-major order."""
    matrix = to_double(g, a)
    return Lu(g, transposed(g, matrix) if g.operand(0).is_contiguous() else matrix)


@aten("_linalg_det")
def det(g: Builder, a: Value) -> tuple[Value, ...]:
    if 0 in g.dims(a):
        return on_empty(g, 1, 0, 0)
    lu = _lu_for_determinant(g, a)
    determinant = lu.sign()
    for pivot in lu.diagonal():
        determinant = determinant * pivot
    return g.squeeze(determinant.value, [-1, -2]), lu.packed, lu.pivots()


@aten("_linalg_slogdet")
def slogdet(g: Builder, a: Value) -> tuple[Value, ...]:
    if 0 in g.dims(a):
        return on_empty(g, 1, 0, 0, 0)
    lu = _lu_for_determinant(g, a)
    sign, size = lu.sign(), Number(g, g.scalar(0.0, torch.float64))
    for pivot in lu.diagonal():
        sign, size = sign * pivot.apply("Sign"), size + abs(pivot).log()
    return g.squeeze(sign.value, [-1, -2]), g.squeeze(size.value, [-1, -2]), lu.packed, lu.pivots()


@aten("linalg_inv_ex")
def inv_ex(g: Builder, a: Value, *, check_errors: bool = False) -> tuple[Value, ...]:
    if check_errors:
        raise Unsupported("an error for a singular matrix")
    if 0 in g.dims(a):
        return on_empty(g, 0, 0)
    lu = Lu(g, to_double(g, a))
    return _solve(g, lu.packed, lu.order(), identity(g, (), matrix_sizes(g, a)[0])), lu.info()


@aten("_linalg_solve_ex")
def solve_ex(g: Builder, a: Value, b: Value, *, left: bool = True, check_errors: bool = False) -> tuple[Value, ...]:
    if check_errors:
        raise Unsupported("an error for a singular matrix")
    if 0 in g.dims(a):
        return on_empty(g, 0, 0, 0, 0)
    vector = g.rank(b) == 1 or g.dims(b) == g.dims(a)[:-1]
    b = to_double(g, g.unsqueeze(b, [-1]) if vector else b)
    lu = Lu(g, to_double(g, a))
    solution = _solve(g, lu.packed, lu.order(), b, left)
    return g.squeeze(solution, [-1]) if vector else solution, lu.packed, lu.pivots(), lu.info()


@aten("linalg_lu_solve")
def lu_solve(g: Builder, packed: Value, pivots: Value, b: Value, *, left: bool = True, adjoint: bool = False) -> Value:
    if 0 in g.like(g.out):
        return filled(g, g.out)
    order = row_order(g, pivots, row_count(g, packed))
    return _solve(g, in_double(g, packed), order, in_double(g, b), left, adjoint)


def _solve(g: Builder, packed: Value, order: Value, b: Value, left: bool = True, adjoint: bool = False) -> Value:
    """(PLU)⁻¹B, or (PLU)⁻ᵀB; for a system from the right, the transposed one."""
    if not left:
        return transposed(g, _solve(g, packed, order, transposed(g, b), adjoint=not adjoint))
    packed, b = broadcast_batch(g, packed, b)
    order, axis = g.expand(order, g.dims(b)), g.rank(b) - 2
    if adjoint:
        packed = transposed(g, packed)
        solution = solve_triangle(g, packed, solve_triangle(g, packed, b, upper=False), upper=True, unit=True)
        return g.shaped(g.ScatterElements(solution, order, solution, axis=axis), g.dims(b))
    b = g.shaped(g.GatherElements(b, order, axis=axis), g.dims(b))
    return solve_triangle(g, packed, solve_triangle(g, packed, b, upper=False, unit=True), upper=True)


# The exponential

_TAYLOR = 12


@aten("linalg_matrix_exp")
def matrix_exp(g: Builder, a: Value) -> Value:
    """Taylor series of A/2ˢ, whose norm is at most ½, squared s times."""
    if g.out.dtype in (torch.float16, torch.bfloat16):
        raise Unsupported("half precision, in which torch's own result overflows")
    matrix = number(g, a)
    dims = g.dims(a)
    if not isinstance(dims[-1], int):
        raise Unsupported("matrices of a symbolic size")
    rows = g.ReduceSum(abs(matrix).value, g.ints([-1]), keepdims=1)
    norm = Number(g, g.shaped(g.ReduceMax(rows, g.ints([-2]), keepdims=1), [*dims[:-2], 1, 1]))
    halvings = ((norm.log() / math.log(2)).apply("Ceil") + 1).at_least(0)
    halvings = halvings.where(norm < math.inf, 0)  # else the result is not finite
    eye = Number(g, identity(g, (), dims[-1]))
    scaled = matrix / matrix.like(2) ** halvings
    total = scaled / _TAYLOR + eye
    for k in reversed(range(1, _TAYLOR)):
        total = _product(scaled, total, dims) / k + eye
    rounds = g.cast(g.ReduceMax(halvings.value, keepdims=0), torch.int64)

    def squared(k: Number, state: Sequence[Number]) -> list[Number]:
        return [_product(state[0], state[0], dims).where(k < halvings, state[0])]

    return loop_numbers(rounds, [total], squared)[0].value


def _product(a: Number, b: Number, dims: Dims) -> Number:
    return Number(a.g, a.g.shaped(a.g.MatMul(a.value, b.value), dims))
