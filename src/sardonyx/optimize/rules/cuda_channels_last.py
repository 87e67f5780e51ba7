"""Convolutional networks with channels last on CUDA, while weights are inputs.

cuDNN's kernels for tensor cores read and write images with channels last, and convert others at every call. So a
convolution is written with channels last between two Transposes, and the Transpose of its result moves towards the
outputs, until it meets the Transpose before the next convolution and both vanish.

Operators of ONNX Runtime's internal domain have the first input and the output with channels last, and otherwise the
attributes and inputs of ONNX's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from sardonyx.optimize.rule import Match, rule_at
from sardonyx.optimize.rules.channels_last import TO_FIRST, TO_LAST, attributes_of, image_of, to_last
from sardonyx.optimize.rules.cuda import CUDA
from sardonyx.sizes import Dim, Dims

CUDA_CHANNELS_LAST = f"{CUDA}/channels_last"
"""What these rules need."""
INTERNAL = "com.ms.internal.nhwc"
_INTERNAL_VERSION = 15
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_LEAST_CHANNELS = 4
"""cuDNN has a kernel for the four channels of a first layer: an image of three gets zeros."""
_CHANNELS_FIRST = (
    *("ConvTranspose", "GroupNormalization", "InstanceNormalization", "DepthToSpace", "LRN"),
    *("Resize", "GatherND"),  # which interpolates too
)
"""Operators over images that have no kernel with channels last here; a convolution with groups is another."""
_MOST_BOUND = 4
"""Convolutions for each of those that make channels last worthwhile."""
_SUITS = "suits_channels_last"
"""Metadata of a graph: whether it suits, found before its first convolution is rewritten."""


def _internal(
    m: Match, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], dims: Sequence[Dim]
) -> ir.Value:
    image = inputs[0]
    assert image is not None
    converted = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
    (y,) = m.g.custom_node(INTERNAL, op_type, inputs, converted, [image.dtype], version=_INTERNAL_VERSION)
    return m.g.shaped(y, dims)


# Convolutions


@rule_at("Conv", needs=CUDA_CHANNELS_LAST, late=True)
def channels_last_convolution(m: Match) -> ir.Value:
    """Conv(x, w) = Transpose(Conv(Transpose(x), w)), with channels last; a Gemm where each pixel is convolved alone."""
    x, weight, *rest = m.node.inputs
    assert x is not None
    assert weight is not None
    _check_convolution(m, x, weight)
    image = m.g.transpose(x, TO_LAST)
    convolve = _pixels_as_product if _is_pointwise(m, m.dims(weight)) else _nhwc_convolution
    y = convolve(m, image, weight)
    if rest and rest[0] is not None:
        y = m.g.Add(y, rest[0])
    return m.g.transpose(y, TO_FIRST)


def _check_convolution(m: Match, x: ir.Value, weight: ir.Value) -> None:
    m.require(not m.node.domain and x.dtype == weight.dtype == ir.DataType.FLOAT16, "not in half precision")
    m.require(len(m.dims(x)) == 4, "not over images")
    m.require(0 not in (*m.dims(x), *m.dims(weight), *m.dims(m.result)), "it is empty")
    m.require(all(isinstance(size, int) for size in m.dims(weight)), "a weight of symbolic size")
    m.require("auto_pad" not in m.node.attributes and not _has_groups(m.node), "auto_pad or groups")
    graph = m.node.graph
    assert graph is not None
    if _SUITS not in graph.meta:
        graph.meta[_SUITS] = _suits_channels_last(graph)
    m.require(graph.meta[_SUITS], "a network that changes back to channels first often")


def _suits_channels_last(graph: Iterable[ir.Node]) -> bool:
    """Whether few of the graph's operators need channels first: there Transposes remain, which cost what they save."""
    nodes = [node for node in graph if not node.domain]
    bound = sum(node.op_type in _CHANNELS_FIRST or _has_groups(node) for node in nodes)
    return bound * _MOST_BOUND <= sum(node.op_type == "Conv" for node in nodes)


def _has_groups(node: ir.Node) -> bool:
    return node.op_type == "Conv" and "group" in node.attributes and node.attributes["group"].as_int() > 1


def _is_pointwise(m: Match, weight: Dims) -> bool:
    moves = *m.attribute(m.result, "pads", ()), *(step - 1 for step in m.attribute(m.result, "strides", ()))
    return weight[2:] == (1, 1) and not any(moves)


def _pixels_as_product(m: Match, image: ir.Value, weight: ir.Value) -> ir.Value:
    *positions, channels = m.dims(image)
    out = m.dims(weight)[0]
    count = math.prod(positions)
    rows, matrix = m.g.reshape(image, [count, channels]), m.g.reshape(weight, [out, channels])
    product = m.g.shaped(m.g.node("Gemm", [rows, matrix], transB=1), [count, out])
    return m.g.reshape(product, [*positions, out])


def _nhwc_convolution(m: Match, image: ir.Value, weight: ir.Value) -> ir.Value:
    """Return the convolution of ONNX Runtime's internal domain, whose weight is an input with channels first.

    NhwcConv, which reads a weight with channels last, has no kernel for one that is not a constant.
    """
    _, channels, *kernel = m.dims(weight)
    if channels < _LEAST_CHANNELS:
        image, weight = _pad_channels(m, image, 3), _pad_channels(m, weight, 1)
    steps = {name: m.attribute(m.result, name) for name in ("strides", "pads", "dilations")}
    attributes = {name: list(value) for name, value in steps.items() if value is not None}
    attributes["kernel_shape"] = list(kernel)
    return _internal(m, "Conv", [image, weight], attributes, to_last(m.dims(m.result)))


def _pad_channels(m: Match, x: ir.Value, axis: int) -> ir.Value:
    """Return an image or a weight with channels of zeros behind its own."""
    dims, after = list(m.dims(x)), [0] * 4
    after[axis] = _LEAST_CHANNELS - dims[axis]
    dims[axis] = _LEAST_CHANNELS
    return m.g.shaped(m.g.Pad(x, m.g.ints([0] * 4 + after)), dims)


# Transposes move from the inputs to the results of what follows


@rule_at("BatchNormalization", needs=CUDA_CHANNELS_LAST, late=True)
def channels_last_batch_norm(m: Match) -> ir.Value:
    """BatchNormalization(Transpose(x)) = Transpose(BatchNormalization(x)), the latter with channels last."""
    image = image_of(m)
    m.require(not m.node.domain and len(m.node.outputs) == 1, "with channels last already, or it returns statistics")
    m.require(not m.attribute(m.result, "training_mode", 0), "in training mode")
    dtypes = {x.dtype for x in m.node.inputs if x is not None}
    m.require(len(dtypes) == 1 and image.dtype in _FLOATS, "no kernel for the dtypes")
    m.require(0 not in m.dims(image), "it is empty")
    epsilon = {"epsilon": m.attribute(m.result, "epsilon", 1e-5)}
    y = _internal(m, "BatchNormalization", [image, *m.node.inputs[1:]], epsilon, m.dims(image))
    return m.g.transpose(y, TO_FIRST)


@rule_at("MaxPool", "AveragePool", "GlobalAveragePool", needs=CUDA_CHANNELS_LAST, late=True)
def channels_last_pool(m: Match) -> ir.Value:
    """Pool(Transpose(x)) = Transpose(Pool(x)), the latter with channels last."""
    image, op_type = image_of(m), m.node.op_type
    m.require(not m.node.domain and len(m.node.outputs) == 1, "with channels last already, or it returns indices")
    m.require(image.dtype in _FLOATS and 0 not in (*m.dims(image), *m.dims(m.result)), "no kernel, or it is empty")
    attributes = attributes_of(m.node)
    plain = max(attributes.pop("dilations", [1])) == 1 and not attributes.pop("storage_order", 0)
    m.require(plain and attributes.pop("auto_pad", "NOTSET") == "NOTSET", "dilations or automatic padding")
    m.require(op_type == "MaxPool" or not attributes.get("ceil_mode", 0), "versions differ in averages at the border")
    return m.g.transpose(_internal(m, op_type, [image], attributes, to_last(m.dims(m.result))), TO_FIRST)
