"""Replace layers by our own operators in lower precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import torch

from sardonyx.errors import OptionError
from sardonyx.native import linear
from sardonyx.options import Options
from sardonyx.precision.convolutions import to_first, to_last, window_of
from sardonyx.precision.layers import Layer, layers_of
from sardonyx.precision.layout import join_layouts
from sardonyx.precision.packing import BIAS, MatrixPacker, Packing
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.sizes import dims, weight_value
from sardonyx.precision.storage import Smoothed, Static, Storage, contents_of
from sardonyx.translate.inference import set_dims


def unsupported_reason(layer: Layer, precision: Type) -> str | None:
    """Return why a layer cannot run in a precision on this machine, or None."""
    kind = linear.PRECISIONS[precision]
    missing = kind.missing()
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    try:
        kind.pack(torch.empty(layer.matrix_sizes, device="meta"))
    except OptionError as error:
        return error.what
    return None


def lower(
    model: ir.Model, plan: Plan, weights: Mapping[str, int], options: Options
) -> tuple[Sequence[Packing], Sequence[Path]]:
    """Replace the layers that a plan has in lower precision, in place; return their packings and libraries.

    `weights` has the argument of each initializer.
    """
    chosen = [(layer, plan.type_of(layer.name)) for layer in layers_of(model.graph)]
    chosen = [(layer, precision) for layer, precision in chosen if precision != FLOAT32]
    packings = [
        _replace(model.graph, layer, precision, plan.storage_of(layer.name), weights) for layer, precision in chosen
    ]
    used = sorted({precision for _, precision in chosen})
    for precision in used:
        model.graph.opset_imports[linear.PRECISIONS[precision].domain] = 1
    libraries = [linear.build(linear.PRECISIONS[precision], options) for precision in used]
    if any(layer.convolves for layer, _ in chosen):
        libraries += join_layouts(model, options)
    return packings, libraries


def _replace(
    graph: ir.Graph, layer: Layer, precision: Type, storage: Storage | None, weights: Mapping[str, int]
) -> Packing:
    """Replace a layer by a node whose packed weight is declared, without its data."""
    assert not isinstance(storage, Static)
    old, kind = layer.result, linear.PRECISIONS[precision]
    pack = kind.pack if storage is None else storage.pack
    packed = pack(torch.empty(layer.matrix_sizes, device="meta"))
    name, nodes, x, window = f"{precision}_{old.name}", [], layer.x, None
    bias = layer.bias
    if layer.form.leaves_bias:
        bias = weight_value(f"{name}_{BIAS}", ir.DataType.FLOAT, (layer.matrix_sizes[1],))
    if layer.convolves:
        nodes.append(_transpose(x, to_last(len(dims(x)))))
        x, window = nodes[0].outputs[0], window_of(layer.node)
    node, constants = linear.linear_node(kind, x, packed, name=name, bias=bias, window=window)
    if isinstance(storage, Smoothed):
        linear.note_channels(node, contents_of(storage.channels))
    nodes.append(node)
    names = dict(zip(packed.constants, (str(value.name) for value in constants), strict=True))
    if layer.form.leaves_bias:
        assert bias is not None
        constants, names = [*constants, bias], names | {BIAS: str(bias.name)}
    for value in constants:
        graph.register_initializer(value)
    if layer.convolves:
        sizes = dims(old)
        set_dims(node.outputs[0], tuple(sizes[axis] for axis in to_last(len(sizes))))
        nodes.append(_transpose(node.outputs[0], to_first(len(sizes))))
    for added in nodes:
        added.meta["fx"] = layer.node.meta.get("fx")
    graph.insert_before(layer.node, nodes)
    folded, form = layer.folded, layer.form
    _take_place(nodes[-1].outputs[0], old)
    graph.remove(layer.nodes[::-1], safe=True)
    for weight in folded:
        if not weight.uses():
            del graph.initializers[str(weight.name)]
    return Packing([weights[str(weight.name)] for weight in folded], MatrixPacker(precision, form, storage), names)


def _transpose(x: ir.Value, order: Sequence[int]) -> ir.Node:
    node = ir.Node("", "Transpose", [x], [ir.AttrInt64s("perm", order)])
    y = node.outputs[0]
    y.name, y.type = f"{x.name}_transposed", x.type
    set_dims(y, tuple(dims(x)[axis] for axis in order))
    return node


def _take_place(new: ir.Value, old: ir.Value) -> None:
    new.name, new.type, new.shape = old.name, old.type, old.shape
    new.meta.update(old.meta)
    old.name = f"{old.name}_replaced"
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
