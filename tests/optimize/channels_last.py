"""Operators with channels last, for which the CPU has no kernels, composed of ONNX's: what rules rely on."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.rules.cuda_channels_last import INTERNAL
from sardonyx.optimize.subgraphs import graphs_of

TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def expand_channels_last(model: ir.Model) -> None:
    """Replace them in place."""
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if node.domain == INTERNAL:
                _expand(graph, node)


def _expand(graph: ir.Graph, node: ir.Node) -> None:
    image = _transpose(node.inputs[0], TO_FIRST)
    plain = ir.Node(
        "", node.op_type, [image.outputs[0], *node.inputs[1:]], list(node.attributes.values()), num_outputs=1
    )
    plain.outputs[0].type = node.outputs[0].type
    result = _transpose(plain.outputs[0], TO_LAST)
    result.outputs[0].name, result.outputs[0].shape = node.outputs[0].name, node.outputs[0].shape
    graph.insert_before(node, [image, plain, result])
    ir.convenience.replace_all_uses_with(node.outputs[0], result.outputs[0], replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _transpose(value: ir.Value | None, perm: tuple[int, ...]) -> ir.Node:
    node = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", perm)], num_outputs=1)
    node.outputs[0].type = value.type if value is not None else None
    return node
