"""Store values between layers in lower precision as bfloat16: half the memory to write and to read.

Layers in bf16 round what they read to it anyway, so their results are the same; those in int8 quantize it further.
Sums with a residual stay in float32, for each rounding adds to those before; but not those of convolutions, whose
images are most of what a network writes and reads.
"""

from __future__ import annotations

from collections.abc import Set
from types import ModuleType

import onnx_ir as ir

from sardonyx.native import attention, images, linear, norm
from sardonyx.precision.views import readers_of, source_of, views_of


def narrow(graph: ir.Graph) -> int:
    """Store values that only layers in lower precision read as bfloat16, in place; return how many."""
    nodes = [node for node in graph if _kind(node) is not None]
    chosen = {node.outputs[0] for node in nodes}
    while wide := {value for value in chosen if not (_is_given(value, chosen) and _is_taken(value, chosen))}:
        chosen -= wide
    for node in nodes:
        _set_types(node, chosen)
    for value in chosen:
        for view in views_of(value):
            view.dtype = ir.DataType.BFLOAT16
        _remove_casts(graph, value)
    return len(chosen)


def _kind(node: ir.Node) -> ModuleType | None:
    """Return what sets the types of a node; None of those that have a type of their own."""
    if linear.is_layer(node):
        return linear
    if attention.is_attention(node):
        return attention
    if norm.is_norm(node):
        return norm
    return images if images.is_image_operator(node) else None


def _is_given(value: ir.Value, chosen: Set[ir.Value]) -> bool:
    """Whether the node that computes a value can do so in bfloat16."""
    node = value.producer()
    assert node is not None
    if images.is_image_operator(node):
        return source_of(node.inputs[0]) in chosen
    if not linear.is_layer(node) or node.inputs[linear.RESIDUAL] is None:
        return True
    return linear.is_convolution(node) and source_of(node.inputs[linear.RESIDUAL]) in chosen


def _is_taken(value: ir.Value, chosen: Set[ir.Value]) -> bool:
    """Whether all that reads a value, or a view of it, takes bfloat16."""
    returned = any(x.is_graph_output() for x in (value, *views_of(value)))
    return not returned and all(_takes(node, index, chosen) for node, index in readers_of(value))


def _takes(node: ir.Node, index: int, chosen: Set[ir.Value]) -> bool:
    """Whether a node takes an input in bfloat16; attention takes all of its operands in one type."""
    if _is_rounding(node):
        return True
    if attention.is_attention(node):
        return index < 3 and not attention.has_past(node) and all(source_of(node.inputs[i]) in chosen for i in range(3))
    if images.is_image_operator(node):
        return index == 0 and node.outputs[0] in chosen
    if not linear.is_layer(node):
        return False
    return index == 0 or (index == linear.RESIDUAL and node.outputs[0] in chosen)


def _is_rounding(node: ir.Node) -> bool:
    return node.op_type == "Cast" and not node.domain and node.attributes["to"].as_int() == ir.DataType.BFLOAT16


def _set_types(node: ir.Node, chosen: Set[ir.Value]) -> None:
    x, result = (
        ir.DataType.BFLOAT16 if value in chosen else ir.DataType.FLOAT
        for value in (source_of(node.inputs[0]), node.outputs[0])
    )
    kind = _kind(node)
    assert kind is not None
    kind.set_types(node, x, result)


def _remove_casts(graph: ir.Graph, value: ir.Value) -> None:
    """Remove casts to bfloat16 of what is in it now."""
    for node in [node for node, _ in readers_of(value) if _is_rounding(node)]:
        source = node.inputs[0]
        assert source is not None
        ir.convenience.replace_all_uses_with(node.outputs[0], source, replace_graph_outputs=True)
        graph.remove(node, safe=True)
