"""Store values between layers in lower precision as bfloat16: half the memory to write and to read.

Layers in bf16 round what they read to it anyway, so their results are the same; those in int8 quantize it more coarsely.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

import onnx_ir as ir

from sardonyx.native import attention, linear

_FREE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators that take any type, and move no data."""
_RESIDUAL = 3


def narrow(graph: ir.Graph) -> int:
    """Store values that only layers in lower precision read as bfloat16, in place; return how many."""
    nodes = [node for node in graph if linear.is_layer(node) or attention.is_attention(node)]
    chosen = {node.outputs[0] for node in nodes if attention.is_attention(node) or node.inputs[_RESIDUAL] is None}
    while wide := {value for value in chosen if not _is_taken(value, chosen)}:
        chosen -= wide
    for node in nodes:
        _set_types(node, chosen)
    for value in chosen:
        _set_views(value)
        _remove_casts(graph, value)
    return len(chosen)


def _is_taken(value: ir.Value, chosen: Set[ir.Value]) -> bool:
    """Whether all that reads a value, or a view of it, takes bfloat16."""
    if value.is_graph_output():
        return False
    return all(
        _is_taken(use.node.outputs[0], chosen) if _is_view(use) else _takes(use, chosen) for use in value.uses()
    )


def _is_view(use: ir.Usage) -> bool:
    return use.node.op_type in _FREE and not use.node.domain and use.idx == 0


def _takes(use: ir.Usage, chosen: Set[ir.Value]) -> bool:
    """Whether a node takes an input in bfloat16; attention takes all of its operands in one type."""
    if _is_rounding(use.node):
        return True
    if attention.is_attention(use.node):
        return use.idx < 3 and all(_source(use.node.inputs[i]) in chosen for i in range(3))
    return linear.is_layer(use.node) and use.idx == 0


def _is_rounding(node: ir.Node) -> bool:
    return node.op_type == "Cast" and not node.domain and node.attributes["to"].as_int() == ir.DataType.BFLOAT16


def _remove_casts(graph: ir.Graph, value: ir.Value) -> None:
    """Remove casts to bfloat16 of what is in it now."""
    for node in [use.node for use in value.uses() if _is_rounding(use.node)]:
        ir.convenience.replace_all_uses_with(node.outputs[0], value, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return what a value is a view of."""
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type in _FREE and not producer.domain:
        return _source(producer.inputs[0])
    return value


def _set_types(node: ir.Node, chosen: Set[ir.Value]) -> None:
    x, result = (
        ir.DataType.BFLOAT16 if value in chosen else ir.DataType.FLOAT
        for value in (_source(node.inputs[0]), node.outputs[0])
    )
    (attention if attention.is_attention(node) else linear).set_types(node, x, result)


def _set_views(value: ir.Value) -> None:
    for node in _views(value):
        node.outputs[0].dtype = ir.DataType.BFLOAT16


def _views(value: ir.Value) -> Iterator[ir.Node]:
    for use in value.uses():
        if _is_view(use):
            yield use.node
            yield from _views(use.node.outputs[0])
