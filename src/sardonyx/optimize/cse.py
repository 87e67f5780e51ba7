"""Common-subexpression elimination: equal nodes become one."""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

from sardonyx.optimize.subgraphs import graphs_of, is_random


def eliminate_common_subexpressions(graph: ir.Graph) -> int:
    """Replace each node by an earlier equal node of its graph; return how many were removed."""
    return sum(map(_eliminate_in_graph, list(graphs_of(graph))))


def _eliminate_in_graph(graph: ir.Graph) -> int:
    seen: dict[Hashable, ir.Node] = {}
    removed = 0
    for node in list(graph):
        if is_random(node) or any(o.is_graph_output() for o in node.outputs):
            continue
        key = _key(node)
        if key is None:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            for old, new in zip(node.outputs, first.outputs, strict=True):
                ir.convenience.replace_all_uses_with(old, new)
            graph.remove(node, safe=True)
            removed += 1
    return removed


_OPAQUE = (
    ir.AttributeType.GRAPH,
    ir.AttributeType.GRAPHS,
    ir.AttributeType.TENSOR,
    ir.AttributeType.TENSORS,
)


def _key(node: ir.Node) -> Hashable | None:
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        if attribute.type in _OPAQUE:
            return None
        value = attribute.value
        attributes.append((name, tuple(value) if isinstance(value, (list, tuple)) else value))
    inputs = tuple(id(x) if x is not None else None for x in node.inputs)
    return (node.domain, node.op_type, len(node.outputs), inputs, tuple(attributes))
