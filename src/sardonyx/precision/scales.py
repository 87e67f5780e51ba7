"""What scales each column of a layer's result, and is folded into its weight: batch norms, and products with a row."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import is_private
from sardonyx.precision.sizes import dims, is_weight


def scale_after(node: ir.Node) -> ir.Node | None:
    """Return the node that alone reads a layer's result and scales its columns by weights; None if there is none."""
    result, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if not is_private(result):
        return None
    reader = next(iter(result.uses())).node
    scales = _is_norm(reader, result) if node.op_type == "Conv" else _is_row_product(reader, result)
    constants = [x for x in (bias, *weights_of(reader, result)) if x is not None]
    return reader if scales and all(map(is_weight, constants)) else None


def weights_of(scale: ir.Node, result: ir.Value) -> list[ir.Value]:
    """Return what a node reads besides a layer's result."""
    return [x for x in scale.inputs if x is not None and x is not result]


def epsilon_of(scale: ir.Node) -> float | None:
    """Return what a batch norm adds to variances; None for a product."""
    if scale.op_type != "BatchNormalization":
        return None
    return scale.attributes["epsilon"].as_float() if "epsilon" in scale.attributes else 1e-5


def _is_norm(node: ir.Node, result: ir.Value) -> bool:
    training = "training_mode" in node.attributes and node.attributes["training_mode"].as_int()
    return not node.domain and node.op_type == "BatchNormalization" and node.inputs[0] is result and not training


def _is_row_product(node: ir.Node, result: ir.Value) -> bool:
    if node.domain or node.op_type != "Mul":
        return False
    return [dims(x) for x in weights_of(node, result)] == [dims(result)[-1:]]
