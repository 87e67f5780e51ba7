"""Linear layers that torchao quantizes in each call, by rows: arithmetic becomes operators of ONNX and of ONNX Runtime.

A layer has codes of each row, c = round(x · (1 / s)), which torch multiplies as bytes, c + 128, and corrects the sums.
The largest number of a row lies between two codes, so it matters that x is not divided by s.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.optimize.pattern import P, array_of, is_private, scalar_of
from sardonyx.optimize.rule import Match, rule
from sardonyx.sizes import Dims, may_be_zero
from sardonyx.translate.builder import MICROSOFT

_LOWEST = P.Where("broken", "nan", P.ReduceMin("x", "axes", _name="low"))
_HIGHEST = P.Where("broken", "nan", P.ReduceMax("x", "axes", _name="high"))


@rule(P.Max(P.Neg(P.Min(_LOWEST, "zero")), P.Max(_HIGHEST, "nought")))
def largest_magnitude(m: Match) -> ir.Value:
    """Max(−Min(min x, 0), Max(max x, 0)) = max |x|, or NaN."""
    nan = scalar_of(m.nan)
    m.require(nan is not None and math.isnan(nan) and m.x.dtype == ir.DataType.FLOAT, "not NaN of float32")
    m.require(all(_is_zero(m, x) for x in (m.zero, m.nought)), "bounds that are not zero, or broadcast")
    keepdims = [m.attribute(x, "keepdims", 1) for x in (m.low, m.high)]
    m.require(keepdims[0] == keepdims[1], "reductions of different shapes")
    magnitudes = m.g.shaped(m.g.Abs(m.x), m.dims(m.x))
    largest = m.g.shaped(m.g.ReduceMax(magnitudes, m.axes, keepdims=keepdims[0]), m.dims(m.high))
    return m.g.Where(m.broken, m.nan, largest)


def _is_zero(m: Match, bound: ir.Value) -> bool:
    """Whether a constant is zero, and does not extend what it bounds."""
    array = array_of(bound)
    return array is not None and not array.any() and m.dims(bound) in ((), m.dims(m.high))


@rule(P.Cast(P.Add(P.Cast(P.Cast(P.Clip(P.Add(P.Round("steps"), "zero"), -128.0, 127.0), _name="codes")), 128.0)))
def quantize_rows(m: Match) -> ir.Value:
    """Clip(Round(steps) + zero, −128, 127) + 128 = QuantizeLinear(steps, 1, zero + 128)."""
    m.require(m.steps.dtype == ir.DataType.FLOAT and m.codes.dtype == ir.DataType.INT8, "other types")
    m.require(m.result.dtype == ir.DataType.UINT8, "codes that are not bytes")
    m.require(_is_byte(m.zero), "a zero point that is not a byte")
    dims, rows = m.dims(m.steps), math.prod(m.dims(m.steps)[:-1])
    if math.prod(m.dims(m.zero)) == 1:
        return m.g.shaped(_codes(m, m.steps, ()), dims)
    m.require(len(dims) >= 1 and m.dims(m.zero) == (*dims[:-1], 1), "no zero point for each row")
    steps = m.g.reshape(m.steps, (rows, dims[-1]))
    return m.g.reshape(m.g.shaped(_codes(m, steps, (rows,)), m.dims(steps)), dims)


def _codes(m: Match, steps: ir.Value, count: Dims) -> ir.Value:
    """Return QuantizeLinear of the steps, with one zero point or one for each row."""
    zero = m.g.Add(m.g.reshape(m.zero, count), m.g.scalar(128, torch.float32))
    operands = [steps, m.g.expand(m.g.scalar(1, torch.float32), count), m.g.cast(zero, torch.uint8)]
    return m.g.node("QuantizeLinear", operands, dtype=ir.DataType.UINT8, axis=0 if count else None)


def _is_byte(value: ir.Value | None) -> bool:
    """Whether the numbers of a value in floating point are integers from −128 to 127."""
    array, node = array_of(value), value.producer() if value is not None else None
    if array is not None:
        return bool(((array >= -128) & (array <= 127) & (array == array.round())).all())
    if node is None or node.op_type not in ("Cast", "Reshape", "Expand"):
        return False
    x = node.inputs[0]
    return _is_byte(x) or (node.op_type == "Cast" and x is not None and x.dtype == ir.DataType.INT8)


@rule(
    P.Sub(
        P.MatMulInteger("a", "b"),
        P.Mul(P.Cast(P.ReduceSum(P.Cast("b"), "axes"), _name="sums"), 128.0, _name="correction"),
    )
)
def zero_point_into_product(m: Match) -> ir.Value:
    """MatMulInteger(a, b) − 128 · Σ b = MatMulInteger(a, b, 128)."""
    axes = array_of(m.axes)
    m.require(axes is not None and axes.tolist() == [0] and len(m.dims(m.b)) == 2, "not sums of columns")
    m.require(m.a.dtype == ir.DataType.UINT8 and m.sums.dtype == ir.DataType.INT32, "other types")
    m.require(not may_be_zero(m.dims(m.b)[0]), "an empty sum")
    m.require(m.dims(m.correction) in (m.dims(m.result)[-1:], (1, *m.dims(m.result)[-1:])), "it broadcasts")
    product = m.g.node("MatMulInteger", [m.a, m.b, m.g.scalar(128, torch.uint8)], dtype=ir.DataType.INT32)
    return m.g.shaped(product, m.dims(m.result))


@rule(P.Mul(P.Mul(P.Cast("sums", _name="real"), "rows"), "columns"), needs=MICROSOFT)
def scales_into_product(m: Match) -> ir.Value:
    """MatMulInteger(a, b) · rows · columns = MatMulIntegerToFloat(a, b; columns) · rows."""
    node = m.sums.producer()
    m.require(node is not None and node.op_type == "MatMulInteger" and is_private(m.sums), "not a product of integers")
    assert node is not None
    a, b, zero, other = (*node.inputs, None, None)[:4]
    assert a is not None
    count, width = (*m.dims(m.result), None)[:2]
    m.require(other is None and len(m.dims(m.result)) == 2, "weights have zero points, or not matrices")
    m.require(m.real.dtype == ir.DataType.FLOAT and not may_be_zero(m.dims(a)[-1]), "not in float32, or an empty sum")
    m.require(m.dims(m.columns) in ((), (1,), (1, 1), (width,)), "no scale for each column")
    columns = m.columns if m.dims(m.columns) == (width,) else m.g.reshape(m.columns, ())
    of_tensor = m.dims(m.rows) in ((), (1,), (1, 1))
    m.require(of_tensor or m.dims(m.rows) == (count, 1), "no scale for each row")
    scale = m.g.reshape(m.rows, ()) if of_tensor else m.g.scalar(1, torch.float32)
    product = m.g.node("MatMulIntegerToFloat", [a, b, scale, columns, zero], domain=MICROSOFT, dtype=ir.DataType.FLOAT)
    product = m.g.shaped(product, m.dims(m.result))
    return product if of_tensor else m.g.Mul(product, m.rows)
