"""Lower ONNX operators to loops, by lookup in the table."""

from __future__ import annotations

import onnx_ir as ir

import sardonyx.native.operators  # noqa: F401  # fills the table
from sardonyx import opsets
from sardonyx.native.inference import unknown_operator, why_unknown
from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import TABLE, TYPES, opset_of

__all__ = ["LAYOUT", "TABLE", "lower"]

LAYOUT = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Identity", "Slice", "Concat", "Split"}
)
"""Operators that only move elements."""


def lower(region: Lowering, node: ir.Node) -> None:
    """Lower one node; `CannotLower` has the reason if it is not supported."""
    entry = TABLE.get((node.domain, node.op_type))
    if entry is None:
        raise CannotLower(f"{unknown_operator(node) or node.op_type} has no lowering")
    for value in (*node.inputs, *node.outputs):
        if value is None or (value.type is None and not value.uses()):
            continue
        if value.type is None:
            raise CannotLower(f"the type of {value.name} is unknown{why_unknown(value)}")
        if value.dtype not in TYPES or not isinstance(value.type, ir.TensorType):
            raise CannotLower(f"{value.name} has the type {value.type}")
    if opset_of(node) < opsets.TENSOR_AXES and not node.domain:
        raise CannotLower(f"{node.op_type} of opset {opset_of(node)}, which is before {opsets.TENSOR_AXES}")
    entry(region, node)
