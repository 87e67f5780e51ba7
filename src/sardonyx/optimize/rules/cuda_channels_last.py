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

from sardonyx.optimize.pattern import array_of, permutation_of
from sardonyx.optimize.rule import Match, rule_at
from sardonyx.optimize.rules.cuda import CUDA
from sardonyx.sizes import Dim, Dims

CHANNELS_LAST = f"{CUDA}/channels_last"
"""What these rules need."""
INTERNAL = "com.ms.internal.nhwc"
_INTERNAL_VERSION = 15
_TO_LAST, _TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
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
_ELEMENTWISE = (
    *("Relu", "Gelu", "QuickGelu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Mish"),
    *("Softplus", "Clip", "Neg", "Exp", "Sqrt", "Reciprocal", "Erf", "Abs", "Cast"),
)


def _channels_last(value: ir.Value | None) -> ir.Value | None:
    """Return x if the value is a Transpose of x from channels last to channels first."""
    producer = value.producer() if value is not None else None
    if permutation_of(producer) != _TO_FIRST:
        return None
    assert producer is not None
    source = producer.inputs[0]
    return source if source is not None and "dims" in source.meta else None


def _image(m: Match) -> ir.Value:
    """Return the first input with channels last; refuse if it is not the Transpose of one."""
    source = _channels_last(m.node.inputs[0])
    m.require(source is not None, "its input is not transposed from channels last")
    assert source is not None
    return source


def _to_last(dims: Dims) -> list[Dim]:
    return [dims[axis] for axis in _TO_LAST]


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def _internal(
    m: Match, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], dims: Sequence[Dim]
) -> ir.Value:
    image = inputs[0]
    assert image is not None
    converted = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
    (y,) = m.g.custom_node(INTERNAL, op_type, inputs, converted, [image.dtype], version=_INTERNAL_VERSION)
    return m.g.shaped(y, dims)


# Convolutions


@rule_at("Conv", needs=CHANNELS_LAST, late=True)
def channels_last_convolution(m: Match) -> ir.Value:
    """Conv(x, w) = Transpose(Conv(Transpose(x), w)), with channels last; a Gemm where each pixel is convolved alone."""
    x, weight, *rest = m.node.inputs
    assert x is not None
    assert weight is not None
    _check_convolution(m, x, weight)
    image = m.g.transpose(x, _TO_LAST)
    convolve = _pixels_as_product if _is_pointwise(m, m.dims(weight)) else _nhwc_convolution
    y = convolve(m, image, weight)
    if rest and rest[0] is not None:
        y = m.g.Add(y, rest[0])
    return m.g.transpose(y, _TO_FIRST)


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
    return _internal(m, "Conv", [image, weight], attributes, _to_last(m.dims(m.result)))


def _pad_channels(m: Match, x: ir.Value, axis: int) -> ir.Value:
    """Return an image or a weight with channels of zeros behind its own."""
    dims, after = list(m.dims(x)), [0] * 4
    after[axis] = _LEAST_CHANNELS - dims[axis]
    dims[axis] = _LEAST_CHANNELS
    return m.g.shaped(m.g.Pad(x, m.g.ints([0] * 4 + after)), dims)


# Transposes move from the inputs to the results of what follows


@rule_at("BatchNormalization", needs=CHANNELS_LAST, late=True)
def channels_last_batch_norm(m: Match) -> ir.Value:
    """BatchNormalization(Transpose(x)) = Transpose(BatchNormalization(x)), the latter with channels last."""
    image = _image(m)
    m.require(not m.node.domain and len(m.node.outputs) == 1, "with channels last already, or it returns statistics")
    m.require(not m.attribute(m.result, "training_mode", 0), "in training mode")
    dtypes = {x.dtype for x in m.node.inputs if x is not None}
    m.require(len(dtypes) == 1 and image.dtype in _FLOATS, "no kernel for the dtypes")
    m.require(0 not in m.dims(image), "it is empty")
    epsilon = {"epsilon": m.attribute(m.result, "epsilon", 1e-5)}
    y = _internal(m, "BatchNormalization", [image, *m.node.inputs[1:]], epsilon, m.dims(image))
    return m.g.transpose(y, _TO_FIRST)


@rule_at(*_ELEMENTWISE, needs=CHANNELS_LAST, late=True)
def channels_last_elementwise(m: Match) -> ir.Value:
    """f(Transpose(x)) = Transpose(f(x))."""
    image = _image(m)
    inputs = [image, *m.node.inputs[1:]]
    y = m.g.node(m.node.op_type, inputs, domain=m.node.domain, **_attributes(m.node))
    return m.g.transpose(m.g.shaped(y, m.dims(image)), _TO_FIRST)


@rule_at("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", needs=CHANNELS_LAST, late=True)
def channels_last_arithmetic(m: Match) -> ir.Value:
    """f(Transpose(x), y) = Transpose(f(x, y with channels last)) if y is transposed too, or has one row per image."""
    m.require(any(_channels_last(x) is not None for x in m.node.inputs), "no input is transposed from channels last")
    operands = [_with_channels_last(m, x) for x in m.node.inputs if x is not None]
    y = m.g.node(m.node.op_type, operands)
    return m.g.transpose(m.g.shaped(y, _to_last(m.dims(m.result))), _TO_FIRST)


def _with_channels_last(m: Match, value: ir.Value) -> ir.Value:
    """Return an operand with channels last: a number, one number per channel, or per image and channel."""
    image = _channels_last(value)
    if image is not None:
        return image
    dims = m.dims(value)
    m.require(len(dims) <= 4, "of more than four axes")
    count, channels, *positions = (1,) * (4 - len(dims)) + tuple(dims)
    m.require(positions == [1, 1], "an operand has channels first")
    if all(dim == 1 for dim in dims):
        return value
    return m.g.reshape(value, [channels] if count == 1 else [count, 1, 1, channels])


@rule_at("MaxPool", "AveragePool", "GlobalAveragePool", needs=CHANNELS_LAST, late=True)
def channels_last_pool(m: Match) -> ir.Value:
    """Pool(Transpose(x)) = Transpose(Pool(x)), the latter with channels last."""
    image, op_type = _image(m), m.node.op_type
    m.require(not m.node.domain and len(m.node.outputs) == 1, "with channels last already, or it returns indices")
    m.require(image.dtype in _FLOATS and 0 not in (*m.dims(image), *m.dims(m.result)), "no kernel, or it is empty")
    attributes = _attributes(m.node)
    plain = max(attributes.pop("dilations", [1])) == 1 and not attributes.pop("storage_order", 0)
    m.require(plain and attributes.pop("auto_pad", "NOTSET") == "NOTSET", "dilations or automatic padding")
    m.require(op_type == "MaxPool" or not attributes.get("ceil_mode", 0), "versions differ in averages at the border")
    return m.g.transpose(_internal(m, op_type, [image], attributes, _to_last(m.dims(m.result))), _TO_FIRST)


@rule_at("Concat", needs=CHANNELS_LAST, late=True)
def channels_last_concat(m: Match) -> ir.Value:
    """Concat(Transpose(x), Transpose(y)) = Transpose(Concat(x, y)), along the axis where they have it."""
    images = [_channels_last(x) for x in m.node.inputs]
    m.require(all(image is not None for image in images), "not all inputs are transposed from channels last")
    axis = _TO_FIRST[m.attribute(m.result, "axis") % 4]
    y = m.g.node("Concat", images, axis=axis)
    return m.g.transpose(m.g.shaped(y, _to_last(m.dims(m.result))), _TO_FIRST)


@rule_at("ReduceMean", "ReduceSum", needs=CHANNELS_LAST, late=True)
def channels_last_reduction(m: Match) -> ir.Value:
    """Reduce(Transpose(x)) over positions = Reduce(x), which has only axes of one element to move."""
    image = _image(m)
    axes = array_of(m.node.inputs[1]) if len(m.node.inputs) > 1 else None
    m.require(axes is not None and {int(axis) % 4 for axis in axes} == {2, 3}, "not over positions, as constants")
    kept = m.attribute(m.result, "keepdims", 1)
    count, *_, channels = m.dims(image)
    y = m.g.node(m.node.op_type, [image, m.g.ints([1, 2])], keepdims=kept)
    if not kept:
        return m.g.shaped(y, [count, channels])
    return m.g.transpose(m.g.shaped(y, [count, 1, 1, channels]), _TO_FIRST)
