"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.totals import integer_sum
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value


@aten("mm", "bmm", "matmul", "mv", "dot")
def matmul(g: Builder, x: Value, y: Value) -> Value:
    """Multiply; vectors become matrices of one row or column: ONNX Runtime's transpose fusions fail for vectors."""
    vectors = [axis for axis, operand in ((-2, x), (-1, y)) if g.rank(operand) == 1]
    left, right = (g.unsqueeze(v, [i]) if g.rank(v) == 1 else v for i, v in ((0, x), (1, y)))
    product = g.MatMul(left, right)
    if not vectors:
        return product
    batch = g.broadcast(left, right, without=2)
    return g.squeeze(g.shaped(product, [*batch, g.dims(left)[-2], g.dims(right)[-1]]), vectors)


def _fits_gemm(g: Builder, bias: Value) -> bool:
    return g.rank(bias) <= 2 and g.out.dtype.is_floating_point


def _is_factor_of_gemm(factor: Operand, g: Builder) -> TypeGuard[int | float]:
    """Whether it can be an attribute: a number, which becomes a float for any dtype of the product."""
    if not isinstance(factor, (int, float)):
        return False
    return g.out.dtype != torch.float64 or float(np.float32(factor)) == factor


@aten("addmm")
def addmm(g: Builder, bias: Value, x: Value, y: Value, *, beta: Operand = 1, alpha: Operand = 1) -> Value:
    if g.dims(x)[1] == 0:  # an empty sum, for which engines leave Gemm undefined
        return g.expand(_scaled(g, bias, beta), g.like(g.out))
    if beta == 0:
        return _scaled(g, g.MatMul(x, y), alpha)
    if _fits_gemm(g, bias) and _is_factor_of_gemm(alpha, g) and _is_factor_of_gemm(beta, g):
        return g.Gemm(x, y, bias, alpha=_unless_one(alpha), beta=_unless_one(beta))
    return g.Add(_scaled(g, g.MatMul(x, y), alpha), _scaled(g, bias, beta))


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else float(factor)


def _scaled(g: Builder, x: Value, factor: Operand) -> Value:
    return x if factor == 1 else g.Mul(x, g.scalar(factor, g.dtype(x)))


def _widen(g: Builder, *operands: Value) -> list[Value]:
    """Use single precision for half on the CPU, where torch rounds such a sum once, at its end."""
    if g.out.device.type != "cpu":
        return list(operands)
    return [g.cast(operand, dtypes.accumulation_dtype(g.out.dtype)) for operand in operands]


@aten("baddbmm", "addmv")
def baddbmm(g: Builder, bias: Value, x: Value, y: Value, *, beta: Operand = 1, alpha: Operand = 1) -> Value:
    bias, x, y = _widen(g, bias, x, y)
    return _add_bias(g, bias, matmul(g, x, y), beta, alpha)


@aten("addbmm")
def addbmm(g: Builder, bias: Value, x: Value, y: Value, *, beta: Operand = 1, alpha: Operand = 1) -> Value:
    bias, x, y = _widen(g, bias, x, y)
    return _add_bias(g, bias, _sum_batch(g, matmul(g, x, y)), beta, alpha)


def _sum_batch(g: Builder, products: Value) -> Value:
    if dtypes.is_integer(g.out.dtype):
        return g.cast(integer_sum(g, products, [0], False), g.out.dtype)
    return g.ReduceSum(products, g.ints([0]), keepdims=0)


def _add_bias(g: Builder, bias: Value, product: Value, beta: Operand, alpha: Operand) -> Value:
    product = _scaled(g, product, alpha)
    return product if beta == 0 else g.Add(product, _scaled(g, bias, beta))


@aten("linear")
def linear(g: Builder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if 1 in (g.rank(weight), g.rank(x)) or not g.out.dtype.is_floating_point:  # engines have no integer Gemm
        product = matmul(g, x, weight if g.rank(weight) == 1 else g.transpose(weight, [1, 0]))
        return product if bias is None else g.Add(product, bias)
    rows: Dim = 1
    for dim in g.dims(x)[:-1]:
        rows = rows * dim
    flat = g.reshape(x, [rows, g.dims(x)[-1]])
    result = g.Gemm(flat, weight, bias, transB=1)
    return g.reshape(g.shaped(result, [rows, g.dims(weight)[0]]), g.like(g.out))


@aten("_trilinear")
def trilinear(
    g: Builder,
    x: Value,
    y: Value,
    z: Value,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> Value:
    """Return the product of three tensors, each constant along the axes it lacks, summed over some axes."""
    if dtypes.is_integer(g.out.dtype):
        raise Unsupported("a product of three integer tensors, which engines sum in double precision")
    letters = "abcdefghijklmnopqrstuvwxyz"[: g.rank(x) + len(expand1)]
    operands = [
        "".join(c for i, c in enumerate(letters) if i not in missing) for missing in (expand1, expand2, expand3)
    ]
    result = "".join(c for i, c in enumerate(letters) if i not in sumdim)
    return g.Einsum(x, y, z, equation=f"{','.join(operands)}->{result}")
