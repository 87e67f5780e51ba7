"""Replace layers by our own operators in lower precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
import torch

from sardonyx.errors import OptionError
from sardonyx.native import linear
from sardonyx.options import Options
from sardonyx.precision.layers import Layer, dims, layers_of
from sardonyx.precision.packing import Packing
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.storage import Storage


def unsupported_reason(layer: Layer, precision: Type) -> str | None:
    """Return why a layer cannot run in a precision on this machine, or None."""
    kind = linear.PRECISIONS[precision]
    missing = kind.missing()
    if missing:
        return f"the processor lacks {', '.join(missing)}"
    try:
        kind.pack(torch.empty(_matrix(layer), device="meta"))
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
    return packings, [linear.build(linear.PRECISIONS[precision], options) for precision in used]


def _replace(
    graph: ir.Graph, layer: Layer, precision: Type, storage: Storage | None, weights: Mapping[str, int]
) -> Packing:
    """Replace a layer by a node whose packed weight is declared, without its data."""
    old, weight, kind = layer.result, layer.weight, linear.PRECISIONS[precision]
    pack = kind.pack if storage is None else storage.pack
    packed = pack(torch.empty(_matrix(layer), device="meta"))
    name = f"{precision}_{old.name}"
    node, constants = linear.linear_node(kind, layer.x, packed, name=name, bias=layer.bias)
    for value in constants:
        graph.register_initializer(value)
    names = dict(zip(packed.constants, (str(value.name) for value in constants), strict=True))
    node.meta["fx"] = layer.node.meta.get("fx")
    graph.insert_before(layer.node, node)
    _take_place(node.outputs[0], old)
    graph.remove(layer.node, safe=True)
    if not weight.uses():
        del graph.initializers[str(weight.name)]
    return Packing(weights[str(weight.name)], precision, layer.transposed, names, storage)


def _take_place(new: ir.Value, old: ir.Value) -> None:
    new.name, new.type, new.shape = old.name, old.type, old.shape
    new.meta.update(old.meta)
    old.name = f"{old.name}_replaced"
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _matrix(layer: Layer) -> tuple[int, int]:
    first, second = (int(size) for size in dims(layer.weight) if isinstance(size, int))
    return (second, first) if layer.transposed else (first, second)
