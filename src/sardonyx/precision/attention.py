"""Attention in bf16: ONNX's operator in float32, replaced by our own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.native import attention
from sardonyx.options import Options
from sardonyx.precision.layers import is_layer
from sardonyx.precision.plan import Plan, Type
from sardonyx.precision.sizes import dims
from sardonyx.precision.views import source_of
from sardonyx.sizes import Dims
from sardonyx.telemetry.source import module_of
from sardonyx.translate.inference import set_dims

PRECISION: Type = attention.BFLOAT16.name
"""The only precision below float32 that it has."""
_UNSUPPORTED = ("left_window_size", "right_window_size", "softcap", "qk_matmul_output_mode")
"""Attributes of ONNX's operator that ours does not have."""


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An Attention of a model, as reports and plans name it."""

    name: str
    node: ir.Node

    @property
    def inputs(self) -> Sequence[ir.Value]:
        """The queries, keys and values, and the bias if there is one."""
        return [x for x in self.node.inputs if x is not None]

    @property
    def has_past(self) -> bool:
        """Whether it alone reads past keys and values joined with those after them, and can read them apart."""
        return all(map(_is_with_past, self.inputs[1:3]))

    @property
    def operands(self) -> Sequence[ir.Value]:
        """The inputs; if it can read a past apart, keys and values without it, and the past ones at the end."""
        q, *joined = self.inputs[:3]
        if not self.has_past:
            return self.inputs
        (past_k, k), (past_v, v) = (_producer(x).inputs for x in joined)
        return [x for x in (q, k, v, *self.inputs[3:], past_k, past_v) if x is not None]

    @property
    def heads(self) -> tuple[int, int]:
        """The numbers of heads of queries and of keys, if operands do not have an axis for them."""
        return self._int("q_num_heads"), self._int("kv_num_heads")

    @property
    def is_causal(self) -> bool:
        """Whether a query reads keys up to its own place."""
        return bool(self._int("is_causal"))

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        given = self.node.attributes.get("scale")
        return given.as_float() if given is not None else 1 / math.sqrt(self._size())

    def _size(self) -> int:
        size = dims(self.inputs[0])[-1]
        assert isinstance(size, int)
        return size // (self.heads[0] or 1)

    def _int(self, name: str) -> int:
        attribute = self.node.attributes.get(name)
        return attribute.as_int() if attribute is not None else 0


def attention_layers_of(graph: ir.Graph) -> Sequence[AttentionLayer]:
    """Return the attention of a graph that can run in lower precision, in its order, with unique names."""
    nodes = [node for node in graph if _is_supported(node)]
    return [AttentionLayer(_name(node, number), node) for number, node in enumerate(nodes, 1)]


def _name(node: ir.Node, number: int) -> str:
    module = module_of(node.meta.get("fx"))
    return f"{module} (attention {number})" if module else f"(attention {number})"


def _is_supported(node: ir.Node) -> bool:
    if node.domain or node.op_type != "Attention" or any(name in node.attributes for name in _UNSUPPORTED):
        return False
    bias = node.inputs[3] if len(node.inputs) > 3 else None
    present = [x for x in (*node.inputs[:3], bias) if x is not None]
    if len([x for x in node.inputs if x is not None]) != len(present) or any(x.uses() for x in node.outputs[1:]):
        return False
    q, k, v = present[:3]
    if any(x.dtype != ir.DataType.FLOAT for x in present) or any(x.is_initializer() for x in (q, k, v)):
        return False
    ranks = {len(dims(x)) for x in (q, k, v)}
    known = isinstance(dims(q)[-1], int) and dims(q)[-1]
    return bool(ranks in ({3}, {4}) and known and (bias is None or _fits(bias, k)))


def _fits(bias: ir.Value, k: ir.Value) -> bool:
    sizes = dims(bias)
    return 2 <= len(sizes) <= 4 and sizes[-1] == dims(k)[-2]


def alone(layer: AttentionLayer, shapes: Sequence[Sequence[int]]) -> ir.Model:
    """Return a model of one attention, of operands of these shapes."""
    graph = layer.node.graph
    assert graph is not None
    inputs = []
    for number, shape in enumerate(shapes):
        inputs.append(ir.Value(name=f"x{number}", type=ir.TensorType(ir.DataType.FLOAT)))
        set_dims(inputs[-1], tuple(shape))
    joins = [_join(*parts) for parts in zip(inputs[-2:], inputs[1:3], strict=True)] if layer.has_past else []
    joined = [join.outputs[0] for join in joins] or inputs[1:3]
    bias = inputs[3 : len(layer.inputs)]
    node = ir.Node("", "Attention", [inputs[0], *joined, *bias], list(layer.node.attributes.values()))
    y = node.outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    set_dims(y, _result_sizes(layer, shapes))
    copy = ir.Graph(inputs, [y], nodes=[*joins, node], opset_imports=dict(graph.opset_imports), name="attention")
    return ir.Model(copy, ir_version=opsets.IR_VERSION)


def _join(past: ir.Value, rest: ir.Value) -> ir.Node:
    """Return a node that joins past keys or values with those after them."""
    node = ir.Node("", "Concat", [past, rest], [ir.AttrInt64("axis", 2)])
    joined, (batch, heads, tokens, size) = node.outputs[0], dims(rest)
    joined.name, joined.type = f"{past.name}_{rest.name}", rest.type
    set_dims(joined, (batch, heads, dims(past)[2] + tokens, size))
    return node


def _result_sizes(layer: AttentionLayer, shapes: Sequence[Sequence[int]]) -> Dims:
    heads, key_heads = layer.heads
    q, _, v, *_ = shapes
    return (*q[:-1], v[-1] // key_heads * heads if key_heads else v[-1])


def lower_attention(model: ir.Model, plan: Plan, options: Options) -> Sequence[Path]:
    """Replace the attention that a plan has in lower precision, in place; return the library that it needs."""
    chosen = [layer for layer in attention_layers_of(model.graph) if plan.type_of(layer.name) == PRECISION]
    for layer in chosen:
        _replace(model.graph, layer)
    if not chosen:
        return []
    model.graph.opset_imports[attention.DOMAIN] = 1
    return [attention.build(options)]


def is_between_layers(layer: AttentionLayer) -> bool:
    """Whether layers compute the queries, keys and values, which are in bfloat16 if these are in lower precision."""
    sources = [source_of(x) for x in layer.inputs[:3]]
    producers = [x.producer() if x is not None else None for x in sources]
    return all(node is not None and is_layer(node) for node in producers)


def take_bfloat16(model: ir.Model) -> None:
    """Let the attention of a model of nothing else take its operands and return its result in bfloat16."""
    (node,) = model.graph
    for x in node.inputs[:3]:
        assert x is not None
        x.dtype = ir.DataType.BFLOAT16
    attention.set_types(node, ir.DataType.BFLOAT16, ir.DataType.BFLOAT16)


def _replace(graph: ir.Graph, layer: AttentionLayer) -> None:
    q, k, v, *biases = layer.inputs
    heads, key_heads = layer.heads
    bias, causal = next(iter(biases), None), layer.is_causal
    node = attention.attention_node(q, k, v, bias, scale=layer.scale, causal=causal, heads=heads, key_heads=key_heads)
    old, new = layer.node.outputs[0], node.outputs[0]
    new.name = f"{PRECISION}_{old.name}"
    set_dims(new, dims(old))
    node.meta["fx"] = layer.node.meta.get("fx")
    graph.insert_before(layer.node, node)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(layer.node, safe=True)
    _read_past(graph, node)


def _read_past(graph: ir.Graph, node: ir.Node) -> None:
    """Let attention read past keys and values where they are, if it alone reads them joined with those after them."""
    joins = [x.producer() for x in node.inputs[1:3] if x is not None and _is_with_past(x)]
    if len(joins) < 2:
        return
    for place, join in enumerate(joins):
        assert join is not None
        past, rest = join.inputs
        node.replace_input_with(attention.PAST + place, past)
        node.replace_input_with(1 + place, rest)
        graph.remove(join, safe=True)


def _producer(x: ir.Value) -> ir.Node:
    node = x.producer()
    assert node is not None
    return node


def _is_with_past(x: ir.Value) -> bool:
    node = x.producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return False
    private = len(x.uses()) == 1 and not x.is_graph_output()
    by_tokens = len(dims(x)) == 4 and node.attributes["axis"].as_int() in (2, -2)
    return private and by_tokens and not any(part is None or part.is_initializer() for part in node.inputs)
