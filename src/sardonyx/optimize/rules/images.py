"""Pooling and depthwise convolutions with channels last on the CPU, by our own operators.

ONNX Runtime has them with channels first or in blocks only. Between convolutions with channels last, the Transposes
around them would take longer than they do.
"""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.optimize.pattern import P, is_private, scalar_of
from sardonyx.optimize.rule import Match, rule, rule_at
from sardonyx.optimize.rules.channels_last import TO_FIRST, TO_LAST, channels_last, image_of, to_last

IMAGES = "sardonyx.images"
"""The domain of these operators."""


@rule(
    P.Where(P.IsNaN(P.AveragePool("x", _name="average")), "nan", P.MaxPool("x", _name="maximum")),
    needs=IMAGES,
    late=True,
)
def channels_last_max_pool_with_nan(m: Match) -> ir.Value:
    """Where(IsNaN(AveragePool(x)), NaN, MaxPool(x)) = MaxPool(x), of our operator, which keeps NaN."""
    number = scalar_of(m.nan)
    m.require(number is not None and math.isnan(number), "it does not keep NaN")
    image = channels_last(m.x)
    m.require(image is not None, "its input is not transposed from channels last")
    assert image is not None
    windows = [_window(m, value) for value in (m.average, m.maximum)]
    m.require(windows[0] == windows[1], "of other windows")
    return _pool(m, "MaxPool", image, windows[0])


@rule_at("MaxPool", "AveragePool", needs=IMAGES, late=True)
def channels_last_pool_on_cpu(m: Match) -> ir.Value:
    """Pool(Transpose(x)) = Transpose(Pool(x)), the latter with channels last."""
    image = image_of(m)
    m.require(len(m.node.outputs) == 1 and not m.node.domain, "it returns indices, or has channels last already")
    readers = {use.node.op_type for use in m.result.uses()}
    m.require(not readers & {"IsNaN", "Where"}, "NaN is kept together with it")
    counts = m.node.op_type == "AveragePool" and bool(m.attribute(m.result, "count_include_pad", 0))
    return _pool(m, m.node.op_type, image, _window(m, m.result), counts_padding=int(counts))


@rule_at("Conv", needs=IMAGES, late=True)
def channels_last_depthwise_convolution(m: Match) -> ir.Value:
    """Conv(x, w) = Transpose(Depthwise(Transpose(x), w)), if one of its neighbours has channels last."""
    m.require(not m.node.domain, "in lower precision already")
    x, weight, *rest = m.node.inputs
    assert x is not None
    assert weight is not None
    m.require(weight.is_initializer(), "its weight is no constant")
    dims = m.dims(weight)
    m.require(len(dims) == 4 and dims[1] == 1 and m.attribute(m.result, "group", 1) == dims[0], "not depthwise")
    m.require(m.dims(x)[1] == dims[0], "several results of each channel")
    m.require(channels_last(x) is not None or _meets_channels_last(m), "no neighbour has channels last")
    places = math.prod(int(size) for size in dims[2:])
    by_place = m.g.transpose(m.g.reshape(weight, [dims[0], places]), [1, 0])
    window = _window(m, m.result, kernel=dims[2:])
    inputs = [m.g.transpose(x, TO_LAST), by_place, *rest]
    (y,) = m.g.custom_node(IMAGES, "DepthwiseConv", inputs, [ir.AttrInt64s("window", window)], [x.dtype])
    return m.g.transpose(m.g.shaped(y, to_last(m.dims(m.result))), TO_FIRST)


@rule_at("BatchNormalization", needs=IMAGES, late=True)
def channels_last_batch_norm_on_cpu(m: Match) -> ir.Value:
    """BatchNormalization(Transpose(x)) = Transpose(x·f + (shift − mean·f)), where f = scale / √(var + ε).

    A depthwise convolution takes both into its constants.
    """
    image = image_of(m)
    m.require(len(m.node.outputs) == 1 and not m.attribute(m.result, "training_mode", 0), "in training mode")
    m.require(not m.node.domain and image.dtype == ir.DataType.FLOAT, "it has channels last already, or is not float32")
    scale, shift, mean, variance = (x for x in m.node.inputs[1:] if x is not None)
    epsilon = m.g.scalar(m.attribute(m.result, "epsilon", 1e-5), torch.float32)
    factor = m.g.Div(scale, m.g.Sqrt(m.g.Add(variance, epsilon)))
    offset = m.g.Sub(shift, m.g.Mul(mean, factor))
    depthwise = image.producer()
    if depthwise is not None and depthwise.op_type == "DepthwiseConv" and is_private(image):
        y = _scaled_convolution(m, depthwise, factor, offset)
    else:
        y = m.g.Add(m.g.Mul(image, factor), offset)
    return m.g.transpose(m.g.shaped(y, m.dims(image)), TO_FIRST)


def _scaled_convolution(m: Match, node: ir.Node, factor: ir.Value, offset: ir.Value) -> ir.Value:
    """Return a depthwise convolution whose result is scaled and shifted, by its constants."""
    x, weight, *rest = node.inputs
    assert weight is not None
    bias = m.g.Add(m.g.Mul(rest[0], factor), offset) if rest and rest[0] is not None else offset
    inputs = [x, m.g.Mul(weight, factor), bias]
    return m.g.custom_node(IMAGES, "DepthwiseConv", inputs, list(node.attributes.values()), [node.outputs[0].dtype])[0]


def _meets_channels_last(m: Match) -> bool:
    return any(use.node.op_type == "Transpose" for use in m.result.uses())


def _window(m: Match, value: ir.Value, kernel: tuple[int, ...] | None = None) -> list[int]:
    """Return the sizes of a window, its strides, padding and dilations; refuse what has other attributes."""
    kernel = kernel or m.attribute(value, "kernel_shape")
    m.require(len(kernel) == 2 and value.dtype == ir.DataType.FLOAT, "not over images in float32")
    automatic = m.attribute(value, "auto_pad", "NOTSET") != "NOTSET" or m.attribute(value, "ceil_mode", 0)
    m.require(not automatic and not m.attribute(value, "storage_order", 0), "automatic padding, or sizes rounded up")
    pads = m.attribute(value, "pads", (0,) * 4)
    m.require(min(pads) >= 0, "negative padding")
    strides, dilations = (m.attribute(value, name, (1, 1)) for name in ("strides", "dilations"))
    return [*kernel, *strides, *pads, *dilations]


def _pool(m: Match, op_type: str, image: ir.Value, window: list[int], counts_padding: int = 0) -> ir.Value:
    attributes = [ir.AttrInt64s("window", window), ir.AttrInt64("counts_padding", counts_padding)]
    (y,) = m.g.custom_node(IMAGES, op_type, [image], attributes, [image.dtype])
    return m.g.transpose(m.g.shaped(y, to_last(m.dims(m.result))), TO_FIRST)
