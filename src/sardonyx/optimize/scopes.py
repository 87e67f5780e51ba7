"""Graphs within graphs: the bodies of If, Loop and Scan, which see the values around them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx_ir as ir

_RANDOM = ("Random", "Dropout", "Bernoulli", "Multinomial")


def bodies_of(node: ir.Node) -> list[ir.Graph]:
    """The graphs that a node holds; for most nodes none."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def graphs_of(graph: ir.Graph) -> Iterator[ir.Graph]:
    """The graph and every graph within it."""
    yield graph
    for node in graph:
        for body in bodies_of(node):
            yield from graphs_of(body)


def nodes_of(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of the graph and of every graph within it."""
    return [node for scope in graphs_of(graph) for node in scope]


def free_tag(graph: ir.Graph) -> str:
    """A mark for new names that no name in the graph has, as those of an earlier rewrite may."""
    names = [str(value.name) for node in nodes_of(graph) for value in node.outputs] + list(graph.initializers)
    tag = "r"
    while any(re.search(rf"_{tag}\d", name) for name in names):
        tag += "r"
    return tag


def is_random(node: ir.Node) -> bool:
    """Whether two equal nodes give different numbers."""
    return node.op_type.startswith(_RANDOM)


def is_read(node: ir.Node) -> bool:
    """Whether some node, within a body or not, reads a result of the node, or a graph returns one."""
    return any(output.uses() or output.is_graph_output() for output in node.outputs)


def remove_dead(node: ir.Node) -> list[ir.Node]:
    """Remove the node, unless it is read, and all before it that only it kept alive; the producers that stay."""
    affected: list[ir.Node] = []
    work = [node]
    while work:
        current = work.pop()
        graph = current.graph
        if graph is None:
            continue  # reached twice
        if is_read(current):
            affected.append(current)
            continue
        work += _detach(current)
        graph.remove(current, safe=True)
    return affected


def _detach(node: ir.Node) -> list[ir.Node]:
    """Empty the node's bodies; whose results it and they read."""
    within = [inner for body in bodies_of(node) for inner in nodes_of(body)]
    read = [value for reader in (node, *within) for value in reader.inputs if value is not None]
    own = set(map(id, within))
    for inner in within:
        inner.resize_inputs(0)
        assert isinstance(inner.graph, ir.Graph)
        inner.graph.remove(inner)
    producers = [value.producer() for value in read]
    return [producer for producer in producers if producer is not None and id(producer) not in own]
