"""Guards around kernels that engines refuse, or crash in, when a tensor has no elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import sympy

from sardonyx import dtypes
from sardonyx.optimize.scopes import free_tag, graphs_of
from sardonyx.sizes import Dim, Dims, may_be_zero
from sardonyx.translate.builder import MICROSOFT, Builder
from sardonyx.translate.inference import set_dims

_Sizes = Callable[[ir.Node], Sequence[Dim]]


def guard_empty(model: ir.Model) -> int:
    """Run such a kernel only if its operands have elements, by an If whose other branch gives zeros; how many are.

    Only kernels are guarded whose sizes are symbolic and may be zero. Zeros are the right result: it has no elements
    itself, or sums over nothing.
    """
    g = Builder(model.graph.opset_imports[""], tag=free_tag(model.graph))
    for value in model.graph.inputs:
        g.sizes.learn(value, value.meta.get("dims") or ())
    found = [(node, sizes) for graph in list(graphs_of(model.graph)) for node in graph if (sizes := _critical(node))]
    for node, sizes in found:
        _guard(g, node, sizes)
    for value in g.initializers.values():
        model.graph.register_initializer(value)
    return len(found)


def _critical(node: ir.Node) -> list[Dim]:
    """The sizes for which the kernel must not run if one of them is zero."""
    sizes = _CRITICAL.get((node.domain, node.op_type))
    if sizes is None or any(value.meta.get("dims") is None or value.dtype is None for value in node.outputs):
        return []
    return [dim for dim in dict.fromkeys(sizes(node)) if not isinstance(dim, int) and may_be_zero(dim)]


def _dims(value: ir.Value | None) -> Dims:
    dims: Dims = (value.meta.get("dims") or ()) if value is not None else ()
    return dims


def _of_first(node: ir.Node) -> Sequence[Dim]:
    return _dims(node.inputs[0])


def _of_all(node: ir.Node) -> Sequence[Dim]:
    return [dim for value in node.inputs for dim in _dims(value)]


def _of_queries_keys_and_values(node: ir.Node) -> Sequence[Dim]:
    if len(node.outputs) > 1:
        return ()  # it returns a cache, which has elements of its own
    return [dim for value in node.inputs[:3] for dim in _dims(value)]


def _normalised(node: ir.Node) -> Sequence[Dim]:
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    return _dims(node.inputs[0])[axis:]


def _of_product(node: ir.Node) -> Sequence[Dim]:
    """A plain product of two matrices, or of stacks that are alike, takes anything.

    FusedMatMul does not: it leaves a sum over nothing undefined, and crashes where stacks are transposed. ONNX Runtime
    makes it of a product whose operand is transposed or scaled.
    """
    left, right = (_dims(value) for value in node.inputs[:2])
    fused = node.op_type == "FusedMatMul" or any(map(_is_fused_with_product, _neighbours(node)))
    if fused:
        return (*left, *right)
    return () if len(right) == 2 or left[:-2] == right[:-2] else (*left[:-2], *right[:-2])


def _neighbours(node: ir.Node) -> list[ir.Node]:
    producers = [value.producer() for value in node.inputs if value is not None]
    return [*(p for p in producers if p is not None), *(use.node for use in node.outputs[0].uses())]


def _is_fused_with_product(node: ir.Node) -> bool:
    return node.op_type == "Transpose" or (
        node.op_type in ("Mul", "Div") and any(_dims(x) in ((), (1,)) for x in node.inputs)
    )


_CRITICAL: dict[tuple[str, str], _Sizes] = {
    ("", "Attention"): _of_queries_keys_and_values,
    (MICROSOFT, "Attention"): _of_first,
    (MICROSOFT, "MultiHeadAttention"): _of_queries_keys_and_values,
    (MICROSOFT, "GroupQueryAttention"): _of_queries_keys_and_values,
    ("", "Einsum"): _of_all,
    ("", "GroupNormalization"): _of_first,
    ("", "InstanceNormalization"): _of_first,
    ("", "LayerNormalization"): _normalised,
    ("", "RMSNormalization"): _normalised,
    (MICROSOFT, "SkipLayerNormalization"): _normalised,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _normalised,
    ("", "ScatterND"): _of_first,
    ("", "MatMul"): _of_product,
    (MICROSOFT, "FusedMatMul"): _of_product,
}


def _guard(g: Builder, node: ir.Node, sizes: Sequence[Dim]) -> None:
    graph, outputs = node.graph, list(node.outputs)
    assert isinstance(graph, ir.Graph)
    with g.sizes.scope():
        for value in node.inputs:
            g.sizes.learn(value, _dims(value)) if value is not None else None
        empty = g.reshape(g.sizes.condition(sympy.Eq(sympy.Mul(*sizes), 0)), ())
        with g.body() as nodes:
            zeros = [g.expand(g.scalar(0, dtypes.to_torch(_dtype(value))), _dims(value)) for value in outputs]
            then = ir.Graph((), [_own(g, zero) for zero in zeros], nodes=nodes, name=g.fresh("empty"))
        made = g.several("If", len(outputs), [empty], then_branch=then)
    graph.insert_before(node, g.nodes)
    g.nodes.clear()
    g.sizes.forget([])
    for old, new in zip(outputs, made, strict=True):
        _take_place(g, old, new)
    moved = [*_private_transposes(node), node]
    for inner in moved:
        graph.remove(inner)
    body = ir.Graph((), outputs, nodes=moved, name=g.fresh("body"))
    _if_of(made[0]).attributes["else_branch"] = ir.AttrGraph("else_branch", body)


def _private_transposes(node: ir.Node) -> list[ir.Node]:
    """Transposes that only this node reads: beside it an engine can fuse them into its kernel."""
    producers = dict.fromkeys(value.producer() for value in node.inputs if value is not None)
    return [
        producer
        for producer in producers
        if producer is not None
        and producer.op_type == "Transpose"
        and producer.graph is node.graph
        and not producer.outputs[0].is_graph_output()
        and all(use.node is node for use in producer.outputs[0].uses())
    ]


def _if_of(value: ir.Value) -> ir.Node:
    producer = value.producer()
    assert producer is not None
    return producer


def _own(g: Builder, value: ir.Value) -> ir.Value:
    """A result by a node of the body itself, which a constant from around it is not."""
    return value if value.producer() is not None else g.shaped(g.Identity(value), g.dims(value))


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _take_place(g: Builder, old: ir.Value, new: ir.Value) -> None:
    """Let all that read or return a value have the new one, under its name."""
    new.name, new.type = old.name, old.type
    set_dims(new, _dims(old))
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name = g.fresh("full")
