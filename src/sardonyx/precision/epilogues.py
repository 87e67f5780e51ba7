"""Let layers in lower precision compute what follows them: a bias, an activation, and the sum with a residual.

Their kernels have the sums of a layer in registers, where this costs nothing; as nodes of their own, each is a pass
over memory. A node is folded into a layer if nothing else reads the layer's result.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sardonyx.native import linear
from sardonyx.precision.sizes import dims
from sardonyx.precision.views import insert_reshape
from sardonyx.sizes import Dims
from sardonyx.translate.builder import MICROSOFT
from sardonyx.translate.inference import set_dims


def fold_epilogues(graph: ir.Graph) -> int:
    """Fold what follows the lowered layers of a graph into their nodes, in place; return how many nodes were folded."""
    return sum(_fold_all(graph, node) for node in list(graph) if linear.is_layer(node))


def _fold_all(graph: ir.Graph, layer: ir.Node) -> int:
    folded = 0
    while True:
        _reshape_rows_first(graph, layer)
        reader = _only_reader(layer.outputs[0])
        if reader is None or not (_fold_addend(layer, reader) or _fold_activation(layer, reader)):
            return folded
        _move_to(graph, layer, reader)
        folded += 1


def _only_reader(value: ir.Value) -> ir.Node | None:
    """Return the only node that reads a value; None if there are more, or the graph returns it."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _move_to(graph: ir.Graph, layer: ir.Node, folded: ir.Node) -> None:
    """Put a layer in the place of a node that it computes now: what it reads may be computed between the two."""
    old, new = folded.outputs[0], layer.outputs[0]
    graph.remove(layer)
    graph.insert_before(folded, layer)
    set_dims(new, dims(old))
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(folded, safe=True)


# Sums


def _fold_addend(layer: ir.Node, reader: ir.Node) -> bool:
    """Fold a sum with a bias, or with a residual of the same sizes; return whether it was one."""
    if reader.domain or reader.op_type != "Add":
        return False
    result = layer.outputs[0]
    left, right = reader.inputs
    addend = right if left is result else left
    if addend is None or addend is result or addend.dtype != result.dtype:
        return False
    if _is_bias(addend, layer):
        layer.replace_input_with(linear.bias_index(layer), addend)
    elif layer.inputs[linear.RESIDUAL] is None and dims(addend) and dims(addend) == dims(result):
        layer.replace_input_with(linear.RESIDUAL, addend)
    else:
        return False
    return True


def _is_bias(addend: ir.Value, layer: ir.Node) -> bool:
    """Whether a layer without an end so far can take this as its bias."""
    taken = [layer.inputs[linear.bias_index(layer)], layer.inputs[linear.RESIDUAL]]
    ended = any(x is not None for x in taken) or linear.activation_of(layer)
    columns = layer.attributes["columns"].as_int()
    return not ended and addend.is_initializer() and addend.dtype == ir.DataType.FLOAT and dims(addend) == (columns,)


# Activations


def _fold_activation(layer: ir.Node, reader: ir.Node) -> bool:
    """Fold an activation, of the sum if there is a residual; return whether it was one."""
    activation = _activation(reader)
    if activation is None or linear.activation_of(layer):
        return False
    layer.attributes["activation"] = ir.AttrInt64("activation", linear.ACTIVATIONS.index(activation))
    layer.attributes["activates_sum"] = ir.AttrInt64("activates_sum", int(layer.inputs[linear.RESIDUAL] is not None))
    return True


def _activation(node: ir.Node) -> str | None:
    """Return the activation that a node is, as layers name them."""
    if [x for x in node.inputs if x is not None] != [node.inputs[0]]:
        return None
    match node.domain, node.op_type:
        case "", "Relu":
            return "relu"
        case "", "Gelu":
            approximate = node.attributes.get("approximate")
            return "tanh_gelu" if approximate is not None and approximate.as_string() == "tanh" else "gelu"
        case domain, "Gelu" if domain == MICROSOFT:
            return "gelu"
        case domain, "FastGelu" if domain == MICROSOFT:
            return "tanh_gelu"
        case domain, "QuickGelu" if domain == MICROSOFT:
            alpha = node.attributes.get("alpha")
            return "silu" if alpha is not None and alpha.as_float() == 1 else None
    return None


# Reshapes between


def _reshape_rows_first(graph: ir.Graph, layer: ir.Node) -> None:
    """Reshape(layer(x)) = layer(Reshape(x)) for as many columns, which leaves what follows next to the layer."""
    reader, x = _only_reader(layer.outputs[0]), layer.inputs[0]
    plain = layer.op_type.startswith("Linear") and layer.inputs[linear.RESIDUAL] is None
    if not plain or x is None or reader is None or reader.op_type != "Reshape" or reader.domain:
        return
    following = _only_reader(reader.outputs[0])
    if following is None or (following.op_type != "Add" and _activation(following) is None):
        return
    sizes = _reshaped_rows(layer, reader)
    if sizes is None:
        return
    rows = insert_reshape(graph, layer, x, sizes, (*dims(reader.outputs[0])[:-1], sizes[-1]))
    layer.replace_input_with(0, rows.outputs[0])
    _move_to(graph, layer, reader)


def _reshaped_rows(layer: ir.Node, reshape: ir.Node) -> Sequence[int] | None:
    """Return the shape to which a Reshape brings the rows of a layer's activations; None if it mixes rows."""
    shape = reshape.inputs[1]
    data = shape.const_value if shape is not None else None
    after: Dims = dims(reshape.outputs[0])
    depth, columns = (layer.attributes[name].as_int() for name in ("depth", "columns"))
    if data is None or not columns or not depth or len(after) < 2 or after[-1] != columns:
        return None
    sizes = [int(size) for size in data.numpy()]
    return None if 0 in sizes else [*sizes[:-1], depth]
