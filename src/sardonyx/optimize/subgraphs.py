"""Subgraphs: the bodies of If, Loop and Scan, which can read values of the graphs around them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

from sardonyx.translate.builder import Builder

_RANDOM = ("Random", "Dropout", "Bernoulli", "Multinomial")


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """Return the subgraphs of a node; most nodes have none."""
    bodies: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            bodies.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies.extend(attribute.as_graphs())
    return bodies


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yield the graph and all of its subgraphs."""
    yield graph
    for node in graph:
        for body in bodies_of(node):
            yield from graphs_of(body)


def nodes_of(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes of the graph and of all of its subgraphs."""
    return [node for scope in graphs_of(graph) for node in scope]


def unused_tag(graph: ir.Graph) -> str:
    """Return a tag for new names that no name in the graph has, as those of an earlier rewrite might."""
    names = [str(value.name) for node in nodes_of(graph) for value in node.outputs] + list(graph.initializers)
    tag = "r"
    while any(re.search(rf"_{tag}\d", name) for name in names):
        tag += "r"
    return tag


def replace_node(graph: ir.Graph, node: ir.Node, g: Builder, value: ir.Value) -> None:
    """Replace a node by the nodes of a builder, which compute `value` instead of its output, and empty the builder."""
    nodes = list(g.nodes)
    g.nodes.clear()
    for added in nodes:
        added.meta["fx"] = node.meta.get("fx")
    if "dims" in node.outputs[0].meta:
        value.meta["dims"] = node.outputs[0].meta["dims"]
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, [value])


def is_random(node: ir.Node) -> bool:
    """Whether the node is random, so that two equal nodes give different numbers."""
    return node.op_type.startswith(_RANDOM)


def is_read(node: ir.Node) -> bool:
    """Whether an output of the node is read, in a subgraph or not, or returned by a graph."""
    return any(output.uses() or output.is_graph_output() for output in node.outputs)


def remove_dead(node: ir.Node) -> list[ir.Node]:
    """Remove the node if unused, with all producers that become unused; return the producers that remain."""
    affected: list[ir.Node] = []
    work = [node]
    while work:
        current = work.pop()
        graph = current.graph
        if graph is None:
            continue  # already removed
        if is_read(current):
            affected.append(current)
            continue
        work += _detach(current)
        graph.remove(current, safe=True)
    return affected


def _detach(node: ir.Node) -> list[ir.Node]:
    """Remove the nodes of the node's bodies; return the producers that it and they read."""
    inner_nodes = [inner for body in bodies_of(node) for inner in nodes_of(body)]
    read = [value for reader in (node, *inner_nodes) for value in reader.inputs if value is not None]
    own = set(map(id, inner_nodes))
    for inner in inner_nodes:
        inner.resize_inputs(0)
        assert isinstance(inner.graph, ir.Graph)
        inner.graph.remove(inner)
    producers = [value.producer() for value in read]
    return [producer for producer in producers if producer is not None and id(producer) not in own]
