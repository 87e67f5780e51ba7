"""What is known of a model's nodes: operator, module, source line, neighbours."""

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
"""How the domains of native kernels begin."""


@dataclass(frozen=True)
class Seen:
    """One node."""

    name: str
    operator: str
    domain: str
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    types: tuple[str, ...] = ()
    """Of what it gives, as `float32[1, 128]`."""
    scope: str = ""
    """The innermost module, as `encoder.layer.0`; empty for the model itself."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """The classes of the modules it is in, by their paths."""
    where: str = ""
    """The line of the user's code."""
    fx: str = ""
    """The FX node it stems from."""

    @property
    def is_native(self) -> bool:
        """Whether it is a kernel of the model's own."""
        return self.domain.startswith(NATIVE)


@dataclass(frozen=True)
class Picture:
    """A model as a drawing shows it."""

    nodes: tuple[Seen, ...]
    inputs: Mapping[str, str]
    """Their types by name."""
    outputs: Mapping[str, str]
    weights: int = 0
    """Bytes of its weights."""

    @classmethod
    def of(cls, model: ir.Model) -> Picture:
        """The model as it is now; bodies of loops and branches are part of their nodes."""
        graph = model.graph
        return cls(
            tuple(_seen(node, index) for index, node in enumerate(graph) if node.op_type != "Constant"),
            {str(x.name): _type(x) for x in graph.inputs if not x.is_initializer()},
            {str(x.name): _type(x) for x in graph.outputs},
            sum(_bytes(value) for value in graph.initializers.values()),
        )

    @classmethod
    def of_bytes(cls, model: bytes) -> Picture:
        """The picture of a serialised model."""
        return cls.of(ir.from_proto(onnx.load_from_string(model)))

    def stands_for(self, node: Seen, others: Picture) -> list[Seen]:
        """The nodes of an earlier picture that one of this picture computes: all between what it reads and gives."""
        here = {seen.name for seen in self.nodes}
        makers = {value: seen for seen in others.nodes for value in seen.gives}
        found: dict[str, Seen] = {}
        waiting = [value for value in node.gives if value not in node.reads]
        while waiting:
            maker = makers.get(waiting.pop())
            if maker is not None and maker.name not in here and maker.name not in found:
                found[maker.name] = maker
                waiting += [value for value in maker.reads if value not in node.reads]
        return [seen for seen in others.nodes if seen.name in found]


def _seen(node: ir.Node, index: int) -> Seen:
    told = dict(node.metadata_props)
    annotate(told, node.meta.get("fx"))
    origin = node.meta.get("fx")
    scopes = _listed(told.get("pkg.torch.onnx.name_scopes", ""))
    modules = [path for path in scopes[:-1] if path]
    classes = [name.rpartition(".")[2] for name in _listed(told.get("pkg.torch.onnx.class_hierarchy", ""))]
    return Seen(
        node.name or f"{node.op_type}_{index}",
        node.op_type,
        node.domain,
        tuple(dict.fromkeys(_read(node))),
        tuple(str(value.name) for value in node.outputs if value.name),
        tuple(_type(value) for value in node.outputs),
        modules[-1] if modules else "",
        dict(zip(scopes[:-1], classes, strict=False)),
        _where(told.get("pkg.torch.onnx.stack_trace", "")),
        origin.name if origin is not None else scopes[-1] if scopes else "",
    )


def _read(node: ir.Node) -> Iterator[str]:
    """The values that a node reads; those its branches and loops read too."""
    for value in node.inputs:
        if value is not None:
            yield str(value.name)
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            made = {id(x) for inner in attribute.as_graph() for x in inner.outputs}
            for inner in attribute.as_graph():
                yield from (str(x.name) for x in inner.inputs if x is not None and id(x) not in made)


@lru_cache(maxsize=4096)
def _where(trace: str) -> str:
    """The user's line in a stack trace, told as that of an FX node is."""
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    return source_of(node) if trace else ""


def _listed(text: str) -> Sequence[str]:
    """A list as metadata writes it; nothing where it is no such list."""
    try:
        found = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError):
        return []
    return [str(part) for part in found] if isinstance(found, list) else []


def _type(value: ir.Value) -> str:
    dtype = value.dtype.name.lower() if value.dtype is not None else "?"
    if value.shape is None:
        return dtype
    return f"{dtype}[{', '.join(str(d) if isinstance(d, int) else str(d.value or '?') for d in value.shape)}]"


def _bytes(value: ir.Value) -> int:
    return value.const_value.nbytes if value.const_value is not None else 0
