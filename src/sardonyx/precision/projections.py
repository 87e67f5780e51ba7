"""Compute layers of one x together: each row is encoded once, and one operator runs instead of several.

The projections to queries, keys and values are such layers, and the two of a gated network, with their product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import onnx_ir as ir

from sardonyx.native import linear
from sardonyx.precision.sizes import dims
from sardonyx.translate.inference import set_dims


def fold_gates(graph: ir.Graph) -> int:
    """Let one node compute activation(layer(x)) · layer(x), in place; return how many do."""
    return sum(_fold_gate(graph, node) for node in list(graph) if node.op_type == "Mul" and not node.domain)


def _fold_gate(graph: ir.Graph, product: ir.Node) -> bool:
    factors = [node for node in map(_private_layer, product.inputs) if node is not None]
    if len(factors) < 2 or factors[0] is factors[1] or linear.join_key(factors[0]) != linear.join_key(factors[1]):
        return False
    gate, other = factors if linear.activation_of(factors[0]) else factors[::-1]
    if linear.activation_of(other) or dims(gate.outputs[0]) != dims(other.outputs[0]):
        return False
    _replace(graph, product, [gate, other, product], linear.join([gate, other], gated=True), product.outputs)
    return True


def _private_layer(value: ir.Value | None) -> ir.Node | None:
    """Return the layer that computes a value which nothing else reads, if it can be joined."""
    node = value.producer() if value is not None else None
    if value is None or node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    return node if linear.is_layer(node) and linear.joins(node) else None


def join_projections(graph: ir.Graph) -> int:
    """Let one node compute up to three layers of the same x, in place; return how many nodes do."""
    together: dict[Hashable, list[ir.Node]] = defaultdict(list)
    for node in graph:
        if linear.is_layer(node) and linear.joins(node):
            together[linear.join_key(node), linear.activation_of(node)].append(node)
    most = linear.MOST_PROJECTIONS
    groups = [nodes[i : i + most] for nodes in together.values() for i in range(0, len(nodes), most)]
    groups = [nodes for nodes in groups if len(nodes) > 1]
    for nodes in groups:
        _replace(graph, nodes[0], nodes, linear.join(nodes), [node.outputs[0] for node in nodes])
    return len(groups)


def _replace(
    graph: ir.Graph, place: ir.Node, old: Sequence[ir.Node], new: ir.Node, results: Sequence[ir.Value]
) -> None:
    """Replace nodes by one at the place of one of them, which computes these results."""
    new.meta["fx"] = place.meta.get("fx")
    for before, after in zip(results, new.outputs, strict=True):
        set_dims(after, dims(before))
    inputs = {x for node in old for x in node.inputs if x is not None}
    ir.convenience.replace_nodes_and_values(graph, place, old, [new], results, new.outputs)
    for x in inputs:  # what the others multiplied channels by
        if x.is_initializer() and not x.uses():
            del graph.initializers[str(x.name)]
