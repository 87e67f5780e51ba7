"""Convolutions as layers: which ones, their windows, and the batch norms that are folded into their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sardonyx.native.linear import Window
from sardonyx.optimize.pattern import is_private
from sardonyx.precision.sizes import dims, is_weight


def to_last(rank: int) -> Sequence[int]:
    """Return the permutation of the axes of images or series that puts channels last, as our operators read them."""
    return (0, *range(2, rank), 1)


def to_first(rank: int) -> Sequence[int]:
    """Return the permutation that puts channels first again."""
    return (0, rank - 1, *range(1, rank - 1))


def is_plain_convolution(node: ir.Node) -> bool:
    """Whether a node is a convolution of images, or series, whose channels are all read for each result."""
    x, weight, *rest = node.inputs
    bias = rest[0] if rest else None
    return (
        x is not None
        and weight is not None
        and len(dims(x)) == len(dims(weight)) == len(dims(node.outputs[0]))
        and len(dims(x)) in (3, 4)
        and _attribute(node, "group", 1) == 1
        and _attribute(node, "auto_pad", "NOTSET") == "NOTSET"
        and min(_attribute(node, "pads", (0,))) >= 0
        and (bias is None or bias.is_initializer())
    )


def window_of(node: ir.Node) -> Window:
    """Return the window of a convolution."""
    weight = node.inputs[1]
    assert weight is not None
    sizes = [int(size) for size in dims(weight)[2:] if isinstance(size, int)]
    axes = len(sizes)
    shape, strides, dilations = (
        (1, *values) if axes == 1 else tuple(values)
        for values in (sizes, _attribute(node, "strides", (1,) * axes), _attribute(node, "dilations", (1,) * axes))
    )
    pads = _attribute(node, "pads", (0,) * (2 * axes))
    return Window(shape, strides, (0, pads[0], 0, pads[1]) if axes == 1 else tuple(pads), dilations)


def norm_after(node: ir.Node) -> ir.Node | None:
    """Return the batch norm, with statistics that are weights, that alone reads a convolution's result."""
    result, bias = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    readers = [use.node for use in result.uses()]
    if not is_private(result) or readers[0].op_type != "BatchNormalization" or readers[0].inputs[0] is not result:
        return None
    statistics = [x for x in (bias, *readers[0].inputs[1:]) if x is not None]
    plain = not readers[0].domain and not _attribute(readers[0], "training_mode", 0)
    return readers[0] if plain and all(map(is_weight, statistics)) else None


def epsilon_of(norm: ir.Node) -> float:
    """Return what a batch norm adds to variances."""
    return float(_attribute(norm, "epsilon", 1e-5))


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default
