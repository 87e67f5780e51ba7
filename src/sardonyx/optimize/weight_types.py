"""Weights that ONNX Runtime would quantize or dequantize otherwise than the model does.

It never folds a DequantizeLinear. Those of weights that are not multiplied in integers it computes at each call: a
product of one row with a weight of 1,024 × 4,096 takes 12 times as long. Its kernel for such weights, MatMulNBits,
either quantizes the other operand, which changes results by 0.5 %, or in 8 bits dequantizes at each call too.

It quantizes the weights of a product in float32 if the operand is dequantized and the result quantized.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from sardonyx.optimize.integers import is_computed_in_integers, is_dequantized, is_requantized
from sardonyx.optimize.subgraphs import replace_node, unused_tag
from sardonyx.translate.builder import Builder

_CODES = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.INT32)


def dequantize_once(model: ir.Model) -> None:
    """Replace, in place, DequantizeLinear of constants by arithmetic, unless their readers compute in integers."""
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for node in list(model.graph):
        if _is_dequantized_constant(node) and not is_computed_in_integers(node):
            replace_node(model.graph, node, g, _real(g, node))
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def keep_float_weights(model: ir.Model) -> None:
    """Let a product with weights in float32 stay one, in place: a Max of its result hides the QuantizeLinear."""
    for node in list(model.graph):
        if _has_float_weights(node) and is_dequantized(node.inputs[0]) and is_requantized(node.outputs[0]):
            _insert_max(model.graph, node)


def _has_float_weights(node: ir.Node) -> bool:
    return node.op_type in ("Conv", "Gemm") and not node.domain and not is_dequantized(node.inputs[1])


def _insert_max(graph: ir.Graph, node: ir.Node) -> None:
    old = node.outputs[0]
    barrier = ir.Node("", "Max", [old], num_outputs=1)
    new = barrier.outputs[0]
    new.name, new.type, new.shape = f"{old.name}_max", old.type, old.shape
    new.meta.update(old.meta)
    barrier.meta["fx"] = node.meta.get("fx")
    ir.convenience.replace_all_uses_with(old, new)
    barrier.replace_input_with(0, old)
    graph.insert_after(node, barrier)


def _is_dequantized_constant(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" and not node.domain else None
    blocks = "block_size" in node.attributes and node.attributes["block_size"].as_int()
    known = codes is not None and codes.dtype in _CODES and node.outputs[0].dtype == ir.DataType.FLOAT
    return known and not blocks and "dims" in node.outputs[0].meta and all(map(_is_constant, node.inputs))


def _is_constant(value: ir.Value | None) -> bool:
    """Whether a value is computed from constants by operators of one operand, as a transposed weight is."""
    if value is None or value.is_initializer():
        return True
    node = value.producer()
    return node is not None and node.op_type in ("Cast", "Transpose", "Reshape") and all(map(_is_constant, node.inputs))


def _real(g: Builder, node: ir.Node) -> ir.Value:
    """Return scale · (codes − zero point)."""
    codes, scale, zero_point = (*node.inputs, None)[:3]
    assert codes is not None
    assert scale is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    if codes.dtype != ir.DataType.INT32:
        codes, zero_point = (x and g.cast(x, torch.float32) for x in (codes, zero_point))
    if zero_point is not None:
        codes = g.Sub(codes, _along(g, zero_point, axis, node.outputs[0]))
    return g.Mul(g.cast(codes, torch.float32), _along(g, scale, axis, node.outputs[0]))


def _along(g: Builder, x: ir.Value, axis: int, result: ir.Value) -> ir.Value:
    """Let a parameter broadcast along the axis of its places."""
    rank = len(result.meta["dims"])
    return g.unsqueeze(x, [i for i in range(rank) if i != axis % rank]) if g.rank(x) else x
