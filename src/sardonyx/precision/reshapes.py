"""Remove Reshapes around our operators, which take rows of any rank.

A layer or a norm computes along the last axis: its result can be reshaped instead of its input, and two Reshapes in a
row are one. Attention of one token takes heads side by side. A step that decodes a token has as many Reshapes as
layers, and each takes about a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sardonyx.native import attention, linear, norm
from sardonyx.precision.sizes import dims
from sardonyx.precision.views import insert_reshape
from sardonyx.sizes import Dims
from sardonyx.translate.inference import set_dims


def remove_reshapes(graph: ir.Graph) -> int:
    """Remove Reshapes before our operators that those after them can make up for, in place; return how many."""
    before = _count(graph)
    for node in list(graph):
        if _is_reshape(node):
            _merge(node)
        elif linear.is_layer(node) and node.inputs[linear.RESIDUAL] is not None:
            _follow_residual(graph, node)
        elif linear.is_layer(node) or norm.is_norm(node):
            _read_rows(node)
        elif attention.is_attention(node):
            _read_heads(graph, node)
    for node in reversed(list(graph)):
        if _is_reshape(node) and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    return before - _count(graph)


def _count(graph: ir.Graph) -> int:
    return sum(map(_is_reshape, graph))


def _is_reshape(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Reshape" and not node.domain


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return x of Reshape(x) with the same last axis; None for other values."""
    node = value.producer() if value is not None else None
    if value is None or node is None or not _is_reshape(node) or node.inputs[0] is None:
        return None
    before, after = dims(node.inputs[0]), dims(value)
    same = before and after and isinstance(after[-1], int) and before[-1] == after[-1]
    return node.inputs[0] if same else None


def _merge(node: ir.Node) -> None:
    """Reshape(Reshape(x)) = Reshape(x), and = x if the sizes are the same."""
    first = node.inputs[0].producer() if node.inputs[0] is not None else None
    if _is_reshape(first) and _sets_all_sizes(node):
        assert first is not None
        node.replace_input_with(0, first.inputs[0])
    x, y = node.inputs[0], node.outputs[0]
    if x is not None and dims(x) and dims(x) == dims(y) and not y.is_graph_output():
        ir.convenience.replace_all_uses_with(y, x)


def _sets_all_sizes(node: ir.Node) -> bool:
    """Whether the result of a Reshape depends only on the elements of its input: it copies no size."""
    shape = node.inputs[1]
    data = shape.const_value if shape is not None else None
    return data is not None and 0 not in data.numpy()


def _read_rows(node: ir.Node) -> None:
    """Reshape(f(Reshape(x))) = Reshape(f(x))."""
    x = _source(node.inputs[0])
    reshaped = all(_is_reshaped(y) for y in node.outputs)
    if x is None or not reshaped or (linear.is_layer(node) and linear.is_convolution(node)):
        return
    node.replace_input_with(0, x)
    for y in node.outputs:
        set_dims(y, (*dims(x)[:-1], dims(y)[-1]))


def _is_reshaped(y: ir.Value) -> bool:
    """Whether nothing reads a value but Reshapes that set all sizes."""
    nodes = [node for node, _ in y.uses()]
    return not y.is_graph_output() and all(_is_reshape(node) and _sets_all_sizes(node) for node in nodes)


def _follow_residual(graph: ir.Graph, node: ir.Node) -> None:
    """f(Reshape(x), Reshape(residual)) = Reshape(f(Reshape(x), residual)): sums keep one shape through a network."""
    (x, residual, *_), y = node.inputs, node.outputs[0]
    source = _source(residual)
    if x is None or source is None or not _is_reshape(x.producer()) or linear.is_convolution(node):
        return
    old, new = dims(y), (*dims(source)[:-1], dims(x)[-1])
    if y.is_graph_output() or not (_is_constant(old) and _is_constant(new)):
        return
    rows = insert_reshape(graph, node, x, _shape_data(new), new)
    node.replace_input_with(0, rows.outputs[0])
    node.replace_input_with(linear.RESIDUAL, source)
    _merge(rows)
    _change_sizes(graph, node, (*new[:-1], old[-1]))


def _read_heads(graph: ir.Graph, node: ir.Node) -> None:
    """(batch, heads, 1, size) = (batch, 1, heads · size): let attention read the heads of one token side by side."""
    y = node.outputs[0]
    for index, attribute in ((2, "key_heads"), (1, "key_heads"), (0, "heads")):
        value = node.inputs[index]
        changes = index == 0
        if value is None or len(dims(value)) != 4 or (changes and not (_is_reshaped(y) and _is_constant(dims(y)))):
            continue
        heads, flat = dims(value)[1], _flat(value)
        if flat is None or not isinstance(heads, int):
            continue
        node.replace_input_with(index, flat)
        node.attributes[attribute] = ir.AttrInt64(attribute, heads)
        if changes:
            batch, _, _, size = dims(y)
            _change_sizes(graph, node, (batch, 1, heads * size))


def _flat(value: ir.Value) -> ir.Value | None:
    """Return the (batch, 1, heads · size) of (batch, heads, 1, size), through a Reshape and a rotary embedding."""
    node, (batch, heads, tokens, size) = value.producer(), dims(value)
    if node is None or tokens != 1 or node.domain or node.inputs[0] is None:
        return None
    sizes = (batch, 1, heads * size)
    if node.op_type == "Reshape":
        return node.inputs[0] if dims(node.inputs[0]) == sizes else None
    private = len(value.uses()) == 1 and not value.is_graph_output()
    if node.op_type != "RotaryEmbedding" or not private or len(dims(node.inputs[0])) != 4:
        return None
    flat = _flat(node.inputs[0])
    if flat is None or not isinstance(heads, int):
        return None
    node.replace_input_with(0, flat)
    node.attributes["num_heads"] = ir.AttrInt64("num_heads", heads)
    set_dims(value, sizes)
    return value


def _change_sizes(graph: ir.Graph, node: ir.Node, sizes: Dims) -> None:
    """Give the result of a node other sizes; what reads it reads a Reshape to those that it had."""
    y = node.outputs[0]
    old, readers = dims(y), [*y.uses()]
    set_dims(y, sizes)
    view = insert_reshape(graph, node, y, _shape_data(old), old, after=True)
    for reader, index in readers:
        reader.replace_input_with(index, view.outputs[0])
    _merge(view)


def _is_constant(sizes: Dims) -> bool:
    """Whether the shape operand of a Reshape to these sizes need not be computed."""
    return 0 not in sizes and _shape_data(sizes).count(-1) <= 1


def _shape_data(sizes: Dims) -> Sequence[int]:
    return [dim if isinstance(dim, int) else -1 for dim in sizes]
