"""Products between DequantizeLinear and QuantizeLinear: in the form for which an engine has kernels of integers.

ONNX Runtime replaces DequantizeLinear → MatMul, Gemm or Conv → QuantizeLinear by one operator of integers. Without the
QuantizeLinear it would dequantize the weights at each call, so `integer_product` replaces that form here.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from sardonyx.optimize.integers import is_requantized
from sardonyx.optimize.pattern import P, scalar_of
from sardonyx.optimize.rule import Match, rule, rule_at
from sardonyx.sizes import may_be_zero
from sardonyx.translate.builder import MICROSOFT

_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclass(frozen=True)
class _Codes:
    """The integers that an operand stands for, and their parameters."""

    value: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int | None
    """Of the parameters; None for those of the whole tensor."""


def _dequantize_of(value: ir.Value | None) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" and not node.domain else None


def _codes(m: Match, operand: ir.Value | None) -> _Codes:
    """Return what DequantizeLinear gives a product, perhaps as a Reshape; refuse other operands."""
    assert operand is not None
    producer = operand.producer()
    reshape = producer if producer is not None and producer.op_type == "Reshape" else None
    node = _dequantize_of(reshape.inputs[0] if reshape is not None else operand)
    m.require(node is not None, "an operand is not dequantized")
    assert node is not None
    value, scale, zero_point = (*node.inputs, None)[:3]
    assert value is not None
    assert scale is not None
    m.require(value.dtype in _BYTES and scale.dtype == ir.DataType.FLOAT, "no kernel for the dtypes")
    m.require("block_size" not in node.attributes or not node.attributes["block_size"].as_int(), "in blocks")
    axis = None if m.dims(scale) in ((), (1,)) else _axis(m, node)
    if reshape is not None:
        m.require(axis is None, "a Reshape of what is dequantized by axis")
        value = m.g.shaped(m.g.Reshape(value, *reshape.inputs[1:], **_attributes(reshape)), m.dims(operand))
    return _Codes(value, scale, zero_point, axis)


def _axis(m: Match, node: ir.Node) -> int:
    axis: int = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    return axis % len(m.dims(node.outputs[0]))


def _attributes(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _is_plain(m: Match) -> bool:
    """Whether the product has no factors, and its left operand is not transposed."""
    factors = (m.attribute(m.result, name, 1.0) for name in ("alpha", "beta"))
    flags = ("transA", "transBatchA", "transBatchB")
    return set(factors) <= {1.0} and not any(m.attribute(m.result, name, 0) for name in flags)


@rule_at("MatMul", "Gemm", "FusedMatMul", needs=MICROSOFT, last=True)
def integer_product(m: Match) -> ir.Value:
    """DequantizeLinear(a) · DequantizeLinear(b) + c = MatMulIntegerToFloat(a, b, c)."""
    returns_codes = m.node.op_type != "FusedMatMul" and is_requantized(m.result)
    m.require(not returns_codes, "the engine has an operator that returns codes")
    m.require(_is_plain(m), "it scales, or transposes its left operand")
    left, right = (_codes(m, x) for x in m.node.inputs[:2])
    rank = len(m.dims(right.value))
    m.require(min(rank, len(m.dims(left.value))) >= 2, "not matrices")
    m.require(not may_be_zero(m.dims(left.value)[-1]), "MatMulIntegerToFloat does not write an empty sum")
    transposed = bool(m.attribute(m.result, "transB", 0))
    columns = rank - 2 if transposed else rank - 1
    m.require(left.axis is None, "the left operand has parameters by axis")
    m.require(right.axis is None or (rank == 2 and right.axis == columns), "parameters along the sum")
    weight = m.g.transpose(right.value, [*range(rank - 2), rank - 1, rank - 2]) if transposed else right.value
    bias = m.node.inputs[2] if len(m.node.inputs) > 2 else None
    is_row = bias is None or m.dims(bias) == m.dims(m.result)[-1:]
    operands = [
        left.value,
        weight,
        left.scale,
        right.scale,
        left.zero_point,
        right.zero_point,
        bias if is_row else None,
    ]
    product = m.g.node("MatMulIntegerToFloat", operands, domain=MICROSOFT, dtype=ir.DataType.FLOAT)
    product = m.g.shaped(product, m.dims(m.result))
    return product if is_row or bias is None else m.g.Add(product, bias)


@rule(P.QuantizeLinear(P.DequantizeLinear("codes", "scale", "zero", _shared=True, _name="real"), "step", "point"))
def drop_requantize(m: Match) -> ir.Value:
    """QuantizeLinear(DequantizeLinear(q)) = q, with the same scale and zero point for the whole tensor."""
    scale, step, zero, point = (scalar_of(x) for x in (m.scale, m.step, m.zero, m.point))
    m.require(scale is not None and scale == step and zero is not None and zero == point, "another scale or zero point")
    m.require(m.codes.dtype in _BYTES and m.codes.dtype == m.result.dtype, "another type")
    m.require(m.real.dtype == ir.DataType.FLOAT and _is_normal(scale), "codes that are not exact")
    return m.codes


def _is_normal(scale: float | None) -> bool:
    """Whether 255 steps of the scale are finite, and one is not subnormal."""
    return scale is not None and 2.0**-126 <= scale <= 2.0**119
