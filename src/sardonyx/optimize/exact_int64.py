"""Operators on int64 with inexact kernels, composed from kernels that are exact.

ONNX Runtime's CPU kernels of Max, Min, Clip, Sign, ReduceMax and ReduceMin compare only the low 32 bits of elements in
vector registers: they take 2 for larger than 2³² + 1. Its CUDA kernels of ReduceMax and ReduceMin compute in double
precision. Its comparisons, Where and TopK are exact on both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial, reduce
from typing import TypeAlias

import onnx_ir as ir
import torch

from sardonyx.optimize.subgraphs import graphs_of, replace_node, unused_tag
from sardonyx.translate.builder import Builder

_Compose: TypeAlias = Callable[[Builder, ir.Node], "ir.Value | None"]


def compose_exact(model: ir.Model, operators: Collection[str]) -> None:
    """Replace these operators, in place, on int64 tensors of more than one element."""
    g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
    for graph in graphs_of(model.graph):
        for node in list(graph):
            if not node.domain and node.op_type in operators and _is_affected(node):
                value = _COMPOSITIONS[node.op_type](g, node)
                if value is not None:
                    replace_node(graph, node, g, value)
    for constant in g.initializers.values():
        model.graph.register_initializer(constant)


def _is_affected(node: ir.Node) -> bool:
    inputs = node.inputs[:1] if node.op_type.startswith("Reduce") else node.inputs
    values = [x for x in inputs if x is not None]
    return values[0].dtype == ir.DataType.INT64 and not all(map(_is_single_element, values))


def _sizes(x: ir.Value) -> tuple[object, ...] | None:
    dims: tuple[object, ...] | None = x.meta.get("dims")
    return dims if dims is not None or x.shape is None else tuple(x.shape)


def _is_single_element(x: ir.Value) -> bool:
    sizes = _sizes(x)
    return sizes is not None and all(size == 1 for size in sizes)


def _larger(g: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    return g.Where(g.Less(x, y), y, x)


def _smaller(g: Builder, x: ir.Value, y: ir.Value) -> ir.Value:
    return g.Where(g.Less(x, y), x, y)


def _fold(choose: Callable[[Builder, ir.Value, ir.Value], ir.Value], g: Builder, node: ir.Node) -> ir.Value:
    operands = [x for x in node.inputs if x is not None]
    return reduce(partial(choose, g), operands[1:], operands[0] if len(operands) > 1 else g.Identity(operands[0]))


def _clip(g: Builder, node: ir.Node) -> ir.Value:
    x, low, high = (*node.inputs, None, None)[:3]
    assert x is not None
    bounded = x if low is None else _larger(g, x, low)
    bounded = bounded if high is None else _smaller(g, bounded, high)
    return g.Identity(x) if bounded is x else bounded


def _sign(g: Builder, node: ir.Node) -> ir.Value:
    """[x > 0] − [x < 0]"""
    (x,) = node.inputs
    assert x is not None
    zero = g.scalar(0, torch.int64)
    return g.Sub(g.cast(g.Greater(x, zero), torch.int64), g.cast(g.Less(x, zero), torch.int64))


def _extreme(largest: int, g: Builder, node: ir.Node) -> ir.Value | None:
    """Take the top element along one axis after the other; None if the axes are not constant."""
    x, axes = node.inputs[0], _axes(node)
    assert x is not None
    if axes is None:
        return None
    for axis in axes:
        x, _ = g.several("TopK", 2, [x, g.ints([1])], axis=axis, largest=largest)
    keepdims = node.attributes.get_int("keepdims", 1)
    return g.Identity(x) if keepdims or not axes else g.Squeeze(x, g.ints(axes))


def _axes(node: ir.Node) -> Sequence[int] | None:
    x, axes = (*node.inputs, None)[:2]
    assert x is not None
    sizes = _sizes(x)
    if axes is not None and axes.const_value is None:
        axes = _unchecked_axes(axes)
        if axes is None:
            return None
    constant = [] if axes is None or axes.const_value is None else axes.const_value.numpy().tolist()
    if constant or node.attributes.get_int("noop_with_empty_axes", 0):
        return constant
    return None if sizes is None else range(len(sizes))


def _unchecked_axes(axes: ir.Value) -> ir.Value | None:
    """Return constant axes from `axes + 0 / count`, which raises if the reduction is empty; TopK raises too."""
    add = axes.producer()
    if add is None or add.op_type != "Add" or add.inputs[0] is None or add.inputs[1] is None:
        return None
    check = add.inputs[1].producer()
    return add.inputs[0] if check is not None and check.op_type == "Div" and _is_zero(check.inputs[0]) else None


def _is_zero(x: ir.Value | None) -> bool:
    return x is not None and x.const_value is not None and not x.const_value.numpy().any()


_COMPOSITIONS: dict[str, _Compose] = {
    "Max": partial(_fold, _larger),
    "Min": partial(_fold, _smaller),
    "Clip": _clip,
    "Sign": _sign,
    "ReduceMax": partial(_extreme, 1),
    "ReduceMin": partial(_extreme, 0),
}
