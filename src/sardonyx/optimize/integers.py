"""Which operators ONNX Runtime computes in integers: those between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sardonyx.optimize.pattern import scalar_of

_LAYOUT = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_BOUNDS = frozenset({"Clip", "Relu"})
_PASSED = _LAYOUT | _BOUNDS
"""Operators that ONNX Runtime moves past a QuantizeLinear, or drops before one."""
_OF_CODES = _LAYOUT | {
    *("Add", "AveragePool", "Concat", "Conv", "Expand", "Gather", "Gemm", "GlobalAveragePool", "LeakyRelu", "MatMul"),
    *("MaxPool", "Mul", "Resize", "Sigmoid", "Slice", "Softmax", "Split", "Where"),
}
"""Operators with a kernel that takes and returns codes."""


def is_computed_in_integers(node: ir.Node) -> bool:
    """Whether a node is part of an operator of integers. A MatMul needs no QuantizeLinear after it."""
    x = node.inputs[0] if node.inputs else None
    source = x.producer() if x is not None else None
    is_quantized = all(map(is_requantized, node.outputs))
    if _is(node, "DequantizeLinear") or (node.op_type in _LAYOUT and not is_quantized and is_dequantized(x)):
        return any(is_computed_in_integers(reader) for reader in _readers(node) if reader.op_type != "QuantizeLinear")
    if _is(node, "QuantizeLinear") or (node.op_type in _PASSED and is_quantized and not is_dequantized(x)):
        return source is not None and not is_dequantized(x) and is_computed_in_integers(source)
    takes_codes = node.op_type in _OF_CODES | _PASSED and (node.op_type == "MatMul" or is_quantized)
    return takes_codes and not node.domain and _reads_codes(node)


def is_dequantized(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear computes the value, perhaps before operators that ONNX Runtime moves it past."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type in _LAYOUT and not node.domain:
        return is_dequantized(node.inputs[0])
    return _is(node, "DequantizeLinear")


def is_requantized(value: ir.Value) -> bool:
    """Whether a QuantizeLinear alone reads the value, perhaps after operators that ONNX Runtime moves past it.

    It drops a Relu only if the code of zero is the lowest.
    """
    readers = [use.node for use in value.uses()]
    if value.is_graph_output() or not readers:
        return False
    if len(readers) == 1 and readers[0].op_type in _PASSED:
        is_bounded = readers[0].op_type in _BOUNDS
        return is_requantized(readers[0].outputs[0]) and not (is_bounded and _has_negative_codes(readers[0].outputs[0]))
    return all(_is(reader, "QuantizeLinear") for reader in readers)


def _has_negative_codes(value: ir.Value) -> bool:
    """Whether the QuantizeLinear that reads the value has codes of negative numbers."""
    reader = next(iter(value.uses())).node
    if not _is(reader, "QuantizeLinear"):
        return _has_negative_codes(reader.outputs[0])
    zero_point = reader.inputs[2] if len(reader.inputs) > 2 else None
    lowest = -128 if reader.outputs[0].dtype == ir.DataType.INT8 else 0
    return (0.0 if zero_point is None else scalar_of(zero_point)) != lowest


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and not node.domain


def _readers(node: ir.Node) -> Sequence[ir.Node]:
    return [use.node for output in node.outputs for use in output.uses()]


def _reads_codes(node: ir.Node) -> bool:
    """Whether all operands that are not constant are dequantized."""
    operands = [x for x in node.inputs if x is not None and not x.is_initializer()]
    return bool(operands) and all(map(is_dequantized, operands))
