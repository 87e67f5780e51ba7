"""Guards for kernels that engines refuse, or crash in, when a tensor is empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import sympy

from sardonyx import dtypes
from sardonyx.optimize.subgraphs import nodes_of, unused_tag
from sardonyx.sizes import Dim, Dims, may_be_zero
from sardonyx.translate.builder import MICROSOFT, Builder
from sardonyx.translate.inference import set_dims

_Sizes = Callable[[ir.Node], Sequence[Dim]]


def guard_empty(model: ir.Model) -> int:
    """Run such kernels only if no operand is empty, by an If whose other branch returns zeros; return how many.

    Only kernels with symbolic sizes that may be zero are guarded. Zeros are correct: the result is empty itself, or an
    empty sum.
    """
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for value in model.graph.inputs:
        g.sizes.learn(value, value.meta.get("dims") or ())
    guarded = [(node, sizes) for node in nodes_of(model.graph) if (sizes := _guarded_sizes(node))]
    for node, sizes in guarded:
        _guard(g, node, sizes)
    for value in g.initializers.values():
        model.graph.register_initializer(value)
    return len(guarded)


def computed_sizes(model: ir.Model) -> list[sympy.Expr]:
    """Return the sizes, computed from those of inputs, that may be zero although no input is empty."""
    sizes = dict.fromkeys(dim for node in nodes_of(model.graph) for dim in _guarded_sizes(node))
    return [dim for dim in sizes if not isinstance(dim, (int, sympy.Symbol))]


def _guarded_sizes(node: ir.Node) -> list[Dim]:
    """Return the sizes of which none may be zero if the kernel runs."""
    sizes = _GUARDED.get((node.domain, node.op_type))
    if sizes is None or any(value.meta.get("dims") is None or value.dtype is None for value in node.outputs):
        return []
    return [dim for dim in dict.fromkeys(sizes(node)) if not isinstance(dim, int) and may_be_zero(dim)]


def _dims(value: ir.Value | None) -> Dims:
    dims: Dims = (value.meta.get("dims") or ()) if value is not None else ()
    return dims


def _first_input_dims(node: ir.Node) -> Sequence[Dim]:
    return _dims(node.inputs[0])


def _all_input_dims(node: ir.Node) -> Sequence[Dim]:
    return [dim for value in node.inputs for dim in _dims(value)]


def _attention_dims(node: ir.Node) -> Sequence[Dim]:
    if len(node.outputs) > 1:
        return ()  # it also returns a cache, which need not be empty
    return [dim for value in node.inputs[:3] for dim in _dims(value)]


def _normalized_dims(node: ir.Node) -> Sequence[Dim]:
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    return _dims(node.inputs[0])[axis:]


def _matmul_dims(node: ir.Node) -> Sequence[Dim]:
    """A plain product of two matrices, or of batches of the same shape, supports empty operands.

    FusedMatMul does not: it leaves an empty sum uninitialized, and crashes on transposed batches. ONNX Runtime creates
    it from a product with a transposed or scaled operand.
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


_GUARDED: dict[tuple[str, str], _Sizes] = {
    ("", "Attention"): _attention_dims,
    (MICROSOFT, "Attention"): _first_input_dims,
    (MICROSOFT, "MultiHeadAttention"): _attention_dims,
    (MICROSOFT, "GroupQueryAttention"): _attention_dims,
    ("", "Einsum"): _all_input_dims,
    ("", "GroupNormalization"): _first_input_dims,
    ("", "InstanceNormalization"): _first_input_dims,
    ("", "LayerNormalization"): _normalized_dims,
    ("", "RMSNormalization"): _normalized_dims,
    (MICROSOFT, "SkipLayerNormalization"): _normalized_dims,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _normalized_dims,
    ("", "ScatterElements"): _first_input_dims,
    ("", "ScatterND"): _first_input_dims,
    ("", "MatMul"): _matmul_dims,
    ("", "MatMulInteger"): lambda node: _dims(node.inputs[0])[-1:],
    (MICROSOFT, "FusedMatMul"): _matmul_dims,
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
            then = ir.Graph((), [_as_body_output(g, zero) for zero in zeros], nodes=nodes, name=g.fresh("empty"))
        results = g.several("If", len(outputs), [empty], then_branch=then)
    graph.insert_before(node, g.nodes)
    g.nodes.clear()
    g.sizes.forget([])
    for old, new in zip(outputs, results, strict=True):
        _replace_value(g, old, new)
    moved = [*_private_transposes(node), node]
    for inner in moved:
        graph.remove(inner)
    body = ir.Graph((), outputs, nodes=moved, name=g.fresh("body"))
    _producer(results[0]).attributes["else_branch"] = ir.AttrGraph("else_branch", body)


def _private_transposes(node: ir.Node) -> list[ir.Node]:
    """Return the Transposes that only this node reads: in the same graph an engine can fuse them into its kernel."""
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


def _producer(value: ir.Value) -> ir.Node:
    producer = value.producer()
    assert producer is not None
    return producer


def _as_body_output(g: Builder, value: ir.Value) -> ir.Value:
    """Return a value computed in the body itself, which an outer constant is not."""
    return value if value.producer() is not None else g.shaped(g.Identity(value), g.dims(value))


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _replace_value(g: Builder, old: ir.Value, new: ir.Value) -> None:
    """Replace all uses of a value, as graph output too, and give the new value its name."""
    new.name, new.type = old.name, old.type
    set_dims(new, _dims(old))
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name = g.fresh("full")
