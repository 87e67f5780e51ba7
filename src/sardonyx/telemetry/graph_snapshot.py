"""A snapshot of a model's graph for reports and profiles: each node's operator, module, source line and neighbours."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import onnx
import onnx_ir as ir
import torch

from sardonyx.telemetry.source import annotate, source_of

NATIVE = "sardonyx.native."
"""Prefix of the domains of native kernels."""


@dataclass(frozen=True)
class NodeSnapshot:
    """One node of a snapshot."""

    name: str
    operator: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[str, ...] = ()
    """The types of its outputs, as `float32[1, 128]`."""
    scope: str = ""
    """Path of the innermost module, as `encoder.layer.0`; empty for the model itself."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Classes of the enclosing modules, by path."""
    where: str = ""
    """Line of the user's code."""
    fx: str = ""
    """Name of the FX node it was translated from."""

    @property
    def is_native(self) -> bool:
        """Whether it is a native kernel."""
        return self.domain.startswith(NATIVE)


@dataclass(frozen=True)
class GraphSnapshot:
    """The graph of a model at one stage."""

    nodes: tuple[NodeSnapshot, ...]
    inputs: Mapping[str, str]
    """Types by name."""
    outputs: Mapping[str, str]
    weights: int = 0
    """Bytes of its weights."""

    @classmethod
    def of(cls, model: ir.Model) -> GraphSnapshot:
        """Snapshot of a model; the bodies of loops and branches are part of their nodes."""
        graph = model.graph
        return cls(
            tuple(_node_snapshot(node, index) for index, node in enumerate(graph) if node.op_type != "Constant"),
            {str(x.name): _type(x) for x in graph.inputs if not x.is_initializer()},
            {str(x.name): _type(x) for x in graph.outputs},
            sum(_bytes(value) for value in graph.initializers.values()),
        )

    @classmethod
    def of_bytes(cls, model: bytes) -> GraphSnapshot:
        """Snapshot of a serialised model."""
        return cls.of(ir.from_proto(onnx.load_from_string(model)))

    def replaced_nodes(self, node: NodeSnapshot, earlier: GraphSnapshot) -> list[NodeSnapshot]:
        """The nodes of an earlier snapshot that `node` replaces: those between its inputs and its outputs."""
        names = {other.name for other in self.nodes}
        producers = {value: other for other in earlier.nodes for value in other.outputs}
        replaced: set[str] = set()
        pending = [value for value in node.outputs if value not in node.inputs]
        while pending:
            producer = producers.get(pending.pop())
            if producer is not None and producer.name not in names and producer.name not in replaced:
                replaced.add(producer.name)
                pending += [value for value in producer.inputs if value not in node.inputs]
        return [other for other in earlier.nodes if other.name in replaced]


def _node_snapshot(node: ir.Node, index: int) -> NodeSnapshot:
    metadata = dict(node.metadata_props)
    annotate(metadata, node.meta.get("fx"))
    origin = node.meta.get("fx")
    scopes = parse_list(metadata.get("pkg.torch.onnx.name_scopes", ""))
    modules = [path for path in scopes[:-1] if path]
    classes = [name.rpartition(".")[2] for name in parse_list(metadata.get("pkg.torch.onnx.class_hierarchy", ""))]
    return NodeSnapshot(
        node.name or f"{node.op_type}_{index}",
        node.op_type,
        node.domain,
        tuple(dict.fromkeys(_input_names(node))),
        tuple(str(value.name) for value in node.outputs if value.name),
        tuple(_type(value) for value in node.outputs),
        modules[-1] if modules else "",
        dict(zip(scopes[:-1], classes, strict=False)),
        _source_line(metadata.get("pkg.torch.onnx.stack_trace", "")),
        origin.name if origin is not None else scopes[-1] if scopes else "",
    )


def _input_names(node: ir.Node) -> Iterator[str]:
    """Names of the values that a node reads, in its branches and loop bodies too."""
    for value in node.inputs:
        if value is not None:
            yield str(value.name)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            inner_values = {id(x) for inner in attribute.as_graph() for x in inner.outputs}
            for inner in attribute.as_graph():
                yield from (str(x.name) for x in inner.inputs if x is not None and id(x) not in inner_values)


@lru_cache(maxsize=4096)
def _source_line(trace: str) -> str:
    """The user's line in a stack trace, in the format of `source_of`."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    return source_of(node) if trace else ""


def parse_list(text: str) -> Sequence[str]:
    """Parse a list in metadata; empty if the text is not a list.

    >>> parse_list("['encoder', 'layer']"), parse_list("{[]: 1}"), parse_list("-" * 50000)
    (['encoder', 'layer'], [], [])
    """
    try:
        parsed = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # text of a file can be anything
        return []
    return [str(part) for part in parsed] if isinstance(parsed, list) else []


def _type(value: ir.Value) -> str:
    dtype = value.dtype.name.lower() if value.dtype is not None else "?"
    if value.shape is None:
        return dtype
    return f"{dtype}[{', '.join(str(d) if isinstance(d, int) else str(d.value or '?') for d in value.shape)}]"


def _bytes(value: ir.Value) -> int:
    return value.const_value.nbytes if value.const_value is not None else 0
