"""Pooling and depthwise convolutions with channels last by our own operators, against torch."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from sardonyx.native import images
from sardonyx.optimize.rules.images import IMAGES
from sardonyx.options import Options
from tests.native.running import run

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
WINDOWS: dict[str, list[int]] = {
    "2 × 2": [2, 2, 2, 2, 0, 0, 0, 0, 1, 1],
    "3 × 3": [3, 3, 1, 1, 1, 1, 1, 1, 1, 1],
    "strides": [3, 2, 2, 3, 1, 0, 1, 1, 1, 1],
    "dilations": [3, 3, 1, 2, 2, 1, 2, 1, 2, 1],
    "7 × 7": [7, 7, 1, 1, 3, 3, 3, 3, 1, 1],
}
"""Sizes, strides, padding at the top, left, bottom and right, and dilations; all fit an image of 5 × 6."""
CHANNELS = (1, 3, 16, 64, 100)


def session(
    operator: str, window: Sequence[int], dtype: ir.DataType = FLOAT, *, counts_padding: int | None = 0
) -> onnxruntime.InferenceSession:
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(["n", "h", "w", "c"]))
    others = [] if counts_padding is not None else [value("weight", 2), value("bias", 1)]
    attributes: list[ir.Attr] = [ir.AttrInt64s("window", window)]
    if counts_padding is not None:
        attributes.append(ir.AttrInt64("counts_padding", counts_padding))
    name = operator + ("Bfloat16" if dtype == BFLOAT16 else "")
    node = ir.Node(IMAGES, name, [x, *others], attributes)
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(dtype)
    opsets = {"": 21, IMAGES: 1}
    graph = ir.Graph([x, *others], node.outputs, nodes=[node], opset_imports=opsets, name="g")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(images.build(Options.of())))
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def value(name: str, rank: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape([f"{name}{axis}" for axis in range(rank)]))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def padded(x: torch.Tensor, window: Sequence[int], number: float) -> torch.Tensor:
    """Images with channels first, in float64, with padding around them."""
    top, left, bottom, right = window[4:8]
    return F.pad(x.double().permute(0, 3, 1, 2), (left, right, top, bottom), value=number)


def max_pool(x: torch.Tensor, window: Sequence[int]) -> torch.Tensor:
    found = F.max_pool2d(padded(x, window, -torch.inf), window[:2], window[2:4], dilation=window[8:])
    return found.permute(0, 2, 3, 1)


def sums(x: torch.Tensor, window: Sequence[int]) -> torch.Tensor:
    channels = x.shape[-1]
    ones = torch.ones(channels, 1, *window[:2], dtype=torch.float64)
    return F.conv2d(padded(x, window, 0.0), ones, stride=window[2:4], dilation=window[8:], groups=channels)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", WINDOWS)
def test_maxima(name: str, channels: int) -> None:
    layer = session("MaxPool", WINDOWS[name])
    for shape in ((2, 5, 6, channels), (0, 5, 6, channels), (1, 9, 7, channels)):
        x = image(*shape)
        (found,) = run(layer, {"x": x.numpy()})
        assert np.array_equal(found, max_pool(x, WINDOWS[name]).numpy())


@pytest.mark.parametrize("channels", [3, 64])
def test_maxima_keep_nan_and_infinity(channels: int) -> None:
    x = torch.full((1, 5, 6, channels), -torch.inf)
    x[0, 1, 1], x[0, 4, 5, 0] = torch.nan, torch.inf
    (found,) = run(session("MaxPool", WINDOWS["3 × 3"]), {"x": x.numpy()})
    assert np.array_equal(found, max_pool(x, WINDOWS["3 × 3"]).numpy(), equal_nan=True)


@pytest.mark.parametrize("counts_padding", [0, 1])
@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "dilations"])
def test_averages(name: str, counts_padding: int) -> None:
    window = WINDOWS[name]
    x = image(2, 5, 6, 19)
    counts = sums(torch.ones_like(x), window) if not counts_padding else window[0] * window[1]
    (found,) = run(session("AveragePool", window, counts_padding=counts_padding), {"x": x.numpy()})
    expected = (sums(x, window) / counts).permute(0, 2, 3, 1)
    torch.testing.assert_close(torch.from_numpy(found), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", WINDOWS)
def test_depthwise_convolutions(name: str, channels: int) -> None:
    window = WINDOWS[name]
    x, weight, bias = image(2, 5, 6, channels), image(window[0] * window[1], channels), image(channels)
    (found,) = run(
        session("DepthwiseConv", window, counts_padding=None),
        {"x": x.numpy(), "weight": weight.numpy(), "bias": bias.numpy()},
    )
    kernel = weight.double().t().reshape(channels, 1, *window[:2])
    images_ = padded(x, window, 0.0)
    expected = F.conv2d(images_, kernel, bias.double(), window[2:4], dilation=window[8:], groups=channels)
    torch.testing.assert_close(torch.from_numpy(found), expected.permute(0, 2, 3, 1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_bfloat16_is_computed_in_float32_and_rounded(operator: str) -> None:
    narrow = image(2, 5, 6, 37).numpy().astype(ml_dtypes.bfloat16)
    (found,) = run(session(operator, WINDOWS["3 × 3"], BFLOAT16), {"x": narrow})
    (wide,) = run(session(operator, WINDOWS["3 × 3"]), {"x": narrow.astype(np.float32)})
    assert found.dtype == narrow.dtype
    assert np.array_equal(found, wide.astype(ml_dtypes.bfloat16))


def test_images_smaller_than_a_window_are_refused() -> None:
    with pytest.raises(Exception, match="another size"):
        run(session("MaxPool", WINDOWS["2 × 2"]), {"x": np.ones((1, 1, 5, 3), np.float32)})
