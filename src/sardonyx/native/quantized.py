"""What ONNX Runtime computes in integers: operators between DequantizeLinear and QuantizeLinear."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
_OF_CODES = frozenset(
    {"Add", "AveragePool", "Concat", "GlobalAveragePool", "LeakyRelu", "MaxPool", "Mul", "Sigmoid", "Softmax", "Where"}
    | {"Expand", "Flatten", "Gather", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators with a kernel that takes and returns codes."""
_BOUNDS = frozenset({"Clip", "Relu"})
"""Operators that a range of codes replaces."""


def is_computed_in_integers(node: ir.Node) -> bool:
    """Whether a node is part of an operator of integers, which a kernel would break up.

    Products need no QuantizeLinear after them.
    """
    if _is(node, "DequantizeLinear"):
        return any(map(is_computed_in_integers, _readers(node)))
    source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if _is(node, "QuantizeLinear"):
        return source is not None and is_computed_in_integers(source)
    if node.op_type in _BOUNDS and not _is(source, "DequantizeLinear"):
        return source is not None and _is_quantized(node) and is_computed_in_integers(source)
    takes_codes = node.op_type in _PRODUCTS or (node.op_type in _OF_CODES | _BOUNDS and _is_quantized(node))
    return takes_codes and _reads_codes(node)


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.op_type == op_type and not node.domain


def _readers(node: ir.Node) -> Sequence[ir.Node]:
    return [use.node for output in node.outputs for use in output.uses()]


def _reads_codes(node: ir.Node) -> bool:
    """Whether all operands that are not constant are dequantized."""
    operands = [x for x in node.inputs if x is not None and not x.is_initializer()]
    return bool(operands) and all(_is(x.producer(), "DequantizeLinear") for x in operands)


def _is_quantized(node: ir.Node) -> bool:
    """Whether only QuantizeLinear reads the result, perhaps after its bounds."""
    readers = _readers(node)
    if len(readers) == 1 and readers[0].op_type in _BOUNDS:
        return _is_quantized(readers[0])
    return bool(readers) and all(_is(reader, "QuantizeLinear") for reader in readers)
