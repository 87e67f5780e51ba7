"""Convolutions as layers: which ones, and their windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sardonyx.native.linear import Window
from sardonyx.precision.sizes import dims


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


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default
