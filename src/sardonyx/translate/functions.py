"""Modules as ONNX functions: extract the nodes of a module's call into a function."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import onnx_ir as ir

log = logging.getLogger(__name__)

ModuleCall: TypeAlias = tuple[str, str]
"""A module's path in the model, and its class."""


def make_functions(model: ir.Model, classes: Sequence[type | str]) -> None:
    """Replace each call of a module of these classes by a call of a function; equal bodies share one function.

    Weights are inputs of the function. A module inside another one that becomes a function remains part of it. Nodes
    marked with a call, a qualified name and the version of its domain become a function too.
    """
    names = frozenset(c if isinstance(c, str) else f"{c.__module__}.{c.__qualname__}" for c in classes)
    known: dict[Hashable, ir.Function] = {}
    for call, nodes in groupby(list(model.graph), key=lambda node: _call(node, names)):
        if call is not None:
            _extract(model, call[1], list(nodes), known)


def _call(node: ir.Node, names: frozenset[str]) -> ModuleCall | None:
    if "function" in node.meta:
        marked: ModuleCall = node.meta["function"]
        return marked
    origin = node.meta.get("fx")
    stack: dict[str, Any] = (origin.meta.get("nn_module_stack") or {}) if origin is not None else {}
    for path, kind in stack.values():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        if name in names or name.rpartition(".")[2] in names:
            return str(path), name
    return None


@dataclass(frozen=True)
class _Body:
    """The nodes of a call, the values they read from outside, and those that the outside reads."""

    nodes: Sequence[ir.Node]
    inputs: Sequence[ir.Value]
    constants: Sequence[ir.Value]
    outputs: Sequence[ir.Value]

    @classmethod
    def from_nodes(cls, nodes: Sequence[ir.Node]) -> _Body:
        inside = {id(node) for node in nodes}
        reads = (x for node in nodes for x in node.inputs if x is not None)
        outer = dict.fromkeys(x for x in reads if id(x.producer()) not in inside)
        outputs = (value for node in nodes for value in node.outputs)
        return cls(
            nodes,
            [x for x in outer if not _is_constant(x)],
            [x for x in outer if _is_constant(x)],
            [v for v in outputs if v.is_graph_output() or any(id(use.node) not in inside for use in v.uses())],
        )


def _is_constant(value: ir.Value) -> bool:
    """Whether a value is a constant of the translation; a weight is not."""
    return type(value.const_value) is ir.Tensor


def _extract(model: ir.Model, qualified: str, nodes: Sequence[ir.Node], known: dict[Hashable, ir.Function]) -> None:
    if any(attribute.type == ir.AttributeType.GRAPH for node in nodes for attribute in node.attributes.values()):
        log.info("%s has control flow and is not made a function", qualified)
        return
    body, graph = _Body.from_nodes(nodes), model.graph
    domain, _, name = qualified.rpartition(".")
    key = (qualified, _structure(body))
    function = known.get(key)
    number = len({f for f in known.values() if f.domain == domain and f.name.split("__")[0] == name})
    call = ir.Node(
        domain,
        function.name if function else f"{name}__{number}" if number else name,
        list(body.inputs),
        num_outputs=len(body.outputs),
        version=nodes[0].meta.get("function_version", 1),
    )
    call.meta["fx"] = nodes[-1].meta.get("fx")
    graph.insert_before(nodes[0], call)
    _redirect(graph, body, call)
    if function is None:
        graph.remove(nodes)
        known[key] = function = _function(domain, call.op_type, body, graph.opset_imports[""])
        model.functions[function.identifier()] = function
        graph.opset_imports[domain] = max(graph.opset_imports.get(domain, 1), call.version or 1)
    else:
        graph.remove(nodes, safe=True)


def _redirect(graph: ir.Graph, body: _Body, call: ir.Node) -> None:
    """Let the outside read the call's outputs instead of the nodes' outputs."""
    inside = {id(node) for node in body.nodes}
    for old, new in zip(body.outputs, call.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        new.meta.update(old.meta)
        for use in list(old.uses()):
            if id(use.node) not in inside:
                use.node.replace_input_with(use.idx, new)
        for index, output in enumerate(graph.outputs):
            if output is old:
                graph.outputs[index] = new
        old.name = f"{old.name}_inside"


def _structure(body: _Body) -> Hashable:
    """Return a key that is equal for calls that can share one function."""
    number: dict[int, Hashable] = {id(value): ("input", i) for i, value in enumerate(body.inputs)}
    for value in body.constants:
        tensor = value.const_value
        assert tensor is not None
        number[id(value)] = (str(tensor.dtype), tuple(tensor.shape), tensor.tobytes())
    structure = []
    for position, node in enumerate(body.nodes):
        attributes = tuple(sorted((a.name, str(a.value)) for a in node.attributes.values()))
        reads = tuple(number[id(x)] if x is not None else None for x in node.inputs)
        structure.append((node.domain, node.op_type, attributes, reads, len(node.outputs)))
        number.update({id(value): (position, i) for i, value in enumerate(node.outputs)})
    types = tuple((str(x.dtype), str(x.shape)) for x in body.inputs)
    return tuple(structure), tuple(number[id(x)] for x in body.outputs), types


def _function(domain: str, name: str, body: _Body, opset: int) -> ir.Function:
    """Return the nodes as a function, whose graph holds constants until `add_constant_nodes`."""
    inner: dict[ir.Value, ir.Value] = {}
    for index, value in enumerate(body.inputs):
        inner[value] = _copy(value, f"x{index}")
    for value in body.constants:
        inner[value] = _copy(value, str(value.name))
        inner[value].const_value = value.const_value
    for node in body.nodes:
        for index, x in enumerate(node.inputs):
            if x in inner:
                node.replace_input_with(index, inner[x])
    graph = ir.Graph(
        [inner[value] for value in body.inputs],
        list(body.outputs),
        nodes=body.nodes,
        initializers=[inner[value] for value in body.constants],
        opset_imports={"": opset, **_domains(body.nodes)},
        name=name,
    )
    return ir.Function(domain, name, graph=graph, attributes=[])


def _domains(nodes: Iterable[ir.Node]) -> dict[str, int]:
    """Return the versions of the domains that nodes need, besides ONNX's own."""
    versions: dict[str, int] = {}
    for node in nodes:
        if node.domain:
            versions[node.domain] = max(versions.get(node.domain, 1), node.version or 1)
    return versions


def _copy(value: ir.Value, name: str) -> ir.Value:
    copy = ir.Value(name=name, type=value.type, shape=value.shape)
    copy.meta.update(value.meta)
    return copy


def add_constant_nodes(model: ir.Model) -> None:
    """Add Constant nodes for the initializers of functions, which ONNX functions cannot have."""
    for function in model.functions.values():
        for name, value in list(function.graph.initializers.items()):
            assert value.const_value is not None
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)], num_outputs=1)
            output = node.outputs[0]
            ir.convenience.replace_all_uses_with(value, output)
            del function.graph.initializers[name]
            output.name, output.type, output.shape = name, value.type, value.shape
            function.graph.insert_before(function.graph[0], node)
