"""Linear layers in bf16, int8 and int4 by our own operators, against float64 and exact integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from sardonyx.errors import EngineError, OptionError
from sardonyx.native import linear
from sardonyx.native.linear import PRECISIONS, PackedWeight, linear_node, pack_int4, quantize_int4, quantize_int8
from sardonyx.native.processor import Processor
from sardonyx.options import Options
from tests.native.running import run

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
NUMPY = {FLOAT: np.dtype(np.float32), BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
HALF_ULP = {FLOAT: 2.0**-24, BFLOAT16: 2.0**-8}
"""The relative error of rounding to a type."""
ROWS = (0, 1, 2, 3, 4, 5, 11, 12, 13, 24, 25, 33)
SHAPES = ((1, 1), (2, 31), (3, 33), (31, 32), (33, 1), (64, 64), (65, 100), (255, 130))
"""Depths and columns; with tails of every kind."""

needs = {
    name: pytest.mark.skipif(bool(precision.missing()), reason=f"no {', '.join(precision.missing())}")
    for name, precision in PRECISIONS.items()
}


def session(
    precision: str,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: bool = False,
    activation: str = "none",
    activates_sum: bool = False,
    window: linear.Window | None = None,
    x_type: ir.DataType = FLOAT,
    result: ir.DataType = FLOAT,
    leading: Sequence[str | int] = ("rows",),
    threads: int = 1,
    packed: PackedWeight | None = None,
) -> onnxruntime.InferenceSession:
    packed = packed or PRECISIONS[precision].pack(weight)
    sizes = [[*leading, size] for size in weight.shape] if window is None else [["n", "h", "w", "c"]] * 2
    x = ir.Value(name="x", type=ir.TensorType(x_type), shape=ir.Shape(sizes[0]))
    addend = ir.Value(name="residual", type=ir.TensorType(result), shape=ir.Shape(sizes[1]))
    constants = [linear._constant("bias", bias)] if bias is not None else []
    node, weights = linear_node(
        PRECISIONS[precision],
        x,
        packed,
        name="layer",
        result=result,
        bias=constants[0] if constants else None,
        residual=addend if residual else None,
        activation=activation,
        activates_sum=activates_sum,
        window=window,
    )
    graph = ir.Graph(
        [x, addend] if residual else [x],
        node.outputs,
        nodes=[node],
        initializers=[*constants, *weights],
        opset_imports={"": 21, node.domain: 1},
        name="g",
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(linear.build(PRECISIONS[precision], Options.of())))
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def weight_of(depth: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(rng(depth, columns).standard_normal((depth, columns), dtype=np.float32))


def assert_near(found: np.ndarray, wanted: np.ndarray, error: np.ndarray) -> None:
    assert found.shape == wanted.shape
    excess = np.abs(found.astype(np.float64) - wanted) - error
    assert (excess <= 0).all(), f"the bound is exceeded by {excess.max()}"


def bound(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The largest error of float32 sums of products."""
    return (x.shape[-1] + 2) * HALF_ULP[FLOAT] * (np.abs(x) @ np.abs(weight)) + 1e-30


# bfloat16


@needs["bf16"]
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_bf16_sums_rounded_operands_in_float32(depth: int, columns: int) -> None:
    weight = weight_of(depth, columns)
    layer, rounded = session("bf16", weight), bfloat16(weight.numpy())
    for rows in ROWS:
        x = rng(rows, depth).standard_normal((rows, depth), dtype=np.float32)
        (found,) = run(layer, {"x": x})
        assert_near(found, bfloat16(x) @ rounded, bound(bfloat16(x), rounded))


@needs["bf16"]
@pytest.mark.parametrize("result", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("x_type", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_bf16_ends_with_bias_activation_and_residual(activation: str, x_type: ir.DataType, result: ir.DataType) -> None:
    weight, bias = weight_of(70, 45) / 8, torch.linspace(-3, 3, 45)
    layer = session("bf16", weight, bias=bias, residual=True, activation=activation, x_type=x_type, result=result)
    x = rng(1).standard_normal((15, 70)).astype(NUMPY[x_type])
    residual = rng(2).standard_normal((15, 45)).astype(NUMPY[result])
    (found,) = run(layer, {"x": x, "residual": residual})
    wanted = end(bfloat16(x.astype(np.float32)) @ bfloat16(weight.numpy()), bias, activation, residual)
    assert found.dtype == NUMPY[result]
    assert_near(found, wanted, HALF_ULP[result] * np.abs(wanted) + 1e-5)


def end(products: np.ndarray, bias: torch.Tensor, activation: str, residual: np.ndarray) -> np.ndarray:
    x = torch.from_numpy(products) + bias.double()
    y = {
        "none": lambda: x,
        "relu": lambda: F.relu(x),
        "gelu": lambda: F.gelu(x),
        "tanh_gelu": lambda: F.gelu(x, approximate="tanh"),
        "silu": lambda: F.silu(x),
    }[activation]()
    return y.numpy() + residual.astype(np.float64)


@needs["bf16"]
def test_bf16_keeps_infinity_and_nan_in_their_rows() -> None:
    weight = weight_of(40, 33)
    x = rng(3).standard_normal((14, 40), dtype=np.float32)
    x[2, 5], x[13, 39] = np.inf, np.nan
    (found,) = run(session("bf16", weight), {"x": x})
    assert np.array_equal(found[2], np.sign(weight[5].numpy()) * np.inf)
    assert np.isnan(found[13]).all()
    assert np.isfinite(np.delete(found, [2, 13], axis=0)).all()


# int8


def quantized_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and zero points of the rows, in the arithmetic of the kernels."""
    least, largest = np.minimum(x.min(-1, initial=0), 0), np.maximum(x.max(-1, initial=0), 0)
    scale = (largest.astype(np.float64) - least) / 255
    scale[scale * 255 < 1e-35] = 1
    inverse = (1 / scale).astype(np.float32)
    zero = np.rint(-least * inverse)
    codes = np.clip(np.rint(x * inverse[:, None]) + zero[:, None], 0, 255)
    return codes.astype(np.int64), scale.astype(np.float32), zero.astype(np.int64)


def exact_int8(x: np.ndarray, weight: torch.Tensor) -> np.ndarray:
    weight_codes, scales = quantize_int8(weight)
    codes, scale, zero = quantized_rows(x)
    sums = (codes - zero[:, None]) @ weight_codes.numpy().astype(np.int64)
    return sums.astype(np.float32) * (scales.numpy() * scale[:, None])


@needs["int8"]
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_int8_is_exact_integer_arithmetic(depth: int, columns: int) -> None:
    weight = weight_of(depth, columns)
    layer = session("int8", weight)
    for rows in ROWS:
        x = rng(rows, depth).standard_normal((rows, depth), dtype=np.float32)
        (found,) = run(layer, {"x": x})
        assert np.array_equal(found, exact_int8(x, weight))


@needs["int8"]
@pytest.mark.parametrize("x_type", [FLOAT, BFLOAT16])
def test_int8_may_multiply_channels_of_x_first(x_type: ir.DataType) -> None:
    weight, channels = weight_of(67, 40), torch.logspace(-3, 3, 67)
    layer = session("int8", weight, packed=linear.pack_int8(weight, channels), x_type=x_type)
    for rows in ROWS:
        x = rng(rows).standard_normal((rows, 67)).astype(NUMPY[x_type])
        (found,) = run(layer, {"x": x})
        scaled = x.astype(np.float32) * channels.numpy()
        assert np.array_equal(found, exact_int8(scaled, weight / channels[:, None]))


@needs["int8"]
@pytest.mark.parametrize("low", [-1, 0, 1])
def test_int8_sums_of_the_largest_codes_do_not_saturate(low: int) -> None:
    weight = torch.full((2**16, 3), 1.0)
    weight[:, 1] = -1
    x = np.full((2, 2**16), 1.0, np.float32)
    x[:, 0] = low
    (found,) = run(session("int8", weight), {"x": x})
    assert np.array_equal(found, exact_int8(x, weight))


@needs["int8"]
def test_int8_rows_of_any_range() -> None:
    weight = weight_of(67, 40) / 16
    x = rng(4).standard_normal((9, 67), dtype=np.float32)
    x[0], x[1], x[2], x[3] = 0, 7, np.abs(x[2]), -np.abs(x[3])
    x[4] *= 1e-30
    x[5] *= 1e36
    x[6, 3], x[7] = 3e38, 1e-40
    (found,) = run(session("int8", weight), {"x": x})
    assert np.array_equal(found, exact_int8(x, weight))
    assert not found[0].any()
    exact = x.astype(np.float64) @ weight.numpy().astype(np.float64)
    step = (np.maximum(x.max(-1), 0) - np.minimum(x.min(-1), 0).astype(np.float64)) / 255
    largest = np.abs(weight.numpy()).max(0) / 254
    error = step[:, None] * np.abs(weight.numpy()).sum(0) + np.abs(x).sum(-1, dtype=np.float64)[:, None] * largest
    assert_near(found, exact, 1.01 * error + 1e-30)


@needs["int8"]
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 15, 16, 69])
def test_int8_rows_that_are_not_finite_are_nan(number: float, place: int) -> None:
    weight = weight_of(70, 33)
    x = rng(5).standard_normal((14, 70), dtype=np.float32)
    x[3, place] = number
    (found,) = run(session("int8", weight), {"x": x})
    assert np.isnan(found[3]).all()
    others = np.delete(x, 3, axis=0)
    assert np.array_equal(np.delete(found, 3, axis=0), exact_int8(others, weight))


@needs["int8"]
@pytest.mark.parametrize("result", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("x_type", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("activation", linear.ACTIVATIONS)
def test_int8_ends_with_bias_activation_and_residual(activation: str, x_type: ir.DataType, result: ir.DataType) -> None:
    weight, bias = weight_of(70, 45) / 8, torch.linspace(-3, 3, 45)
    layer = session("int8", weight, bias=bias, residual=True, activation=activation, x_type=x_type, result=result)
    x = rng(1).standard_normal((15, 70)).astype(NUMPY[x_type])
    residual = rng(2).standard_normal((15, 45)).astype(NUMPY[result])
    (found,) = run(layer, {"x": x, "residual": residual})
    products = exact_int8(x.astype(np.float32), weight).astype(np.float64)
    wanted = end(products, bias, activation, residual)
    assert found.dtype == NUMPY[result]
    assert_near(found, wanted, HALF_ULP[result] * np.abs(wanted) + 1e-5)


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_weights_that_are_not_finite_are_refused(quantize: Callable[[torch.Tensor], object]) -> None:
    for number in (torch.inf, torch.nan):
        with pytest.raises(OptionError, match="infinity or NaN"):
            quantize(torch.tensor([[1.0, number]]))


def test_int8_refuses_a_depth_where_sums_may_overflow() -> None:
    with pytest.raises(OptionError, match="overflow"):
        quantize_int8(torch.ones(2**16 + 1, 1))


def test_int8_columns_of_zeros_have_a_scale() -> None:
    codes, scales = quantize_int8(torch.tensor([[0.0, 2.0], [0.0, -4.0]]))
    assert codes.tolist() == [[0, 64], [0, -127]]
    assert scales.tolist() == pytest.approx([1, 4 / 127])


# int4


@needs["int4"]
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_int4_is_a_bf16_product_with_the_weights_that_the_codes_stand_for(
    depth: int, columns: int, block: int, symmetric: bool
) -> None:
    quantized = quantize_int4(weight_of(depth, columns) + 0.5, block, symmetric=symmetric)
    layer = session("int4", quantized.codes, packed=pack_int4(quantized))
    weight = quantized.dequantized().double().numpy()
    magnitude = np.abs(weight) + 8 * quantized.scales.abs().amax(0).double().numpy()
    for rows in ROWS:
        x = rng(rows, depth).standard_normal((rows, depth), dtype=np.float32)
        (found,) = run(layer, {"x": x})
        assert_near(found, bfloat16(x) @ weight, bound(bfloat16(x), magnitude))


@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_weights_are_within_half_a_step(symmetric: bool) -> None:
    weight = weight_of(200, 30)
    quantized = quantize_int4(weight, 32, symmetric=symmetric)
    steps = quantized.scales.abs().repeat_interleave(32, 0)[:200]
    error = (quantized.dequantized() - weight).abs() / steps
    assert error.max() <= (1 if symmetric else 0.5) + 1e-5  # a symmetric block's other end may be cut off by one step
    assert int(quantized.codes.max()) == 15
    assert int(quantized.codes.min()) == 0


def test_int4_blocks_of_zeros_stay_zero() -> None:
    for symmetric in (True, False):
        assert not quantize_int4(torch.zeros(40, 3), 32, symmetric=symmetric).dequantized().any()


# All


each = pytest.mark.parametrize("precision", [pytest.param(name, marks=needs[name]) for name in PRECISIONS])


@each
def test_a_row_gives_the_same_in_any_batch_and_on_any_threads(precision: str) -> None:
    weight = weight_of(300, 500)
    x = rng(6).standard_normal((300, 300), dtype=np.float32)
    layer, threaded = session(precision, weight), session(precision, weight, threads=2)
    (whole,) = run(layer, {"x": x})
    for rows in (1, 2, 3, 5, 12, 40, 300):
        assert np.array_equal(run(layer, {"x": x[:rows]})[0], whole[:rows])
        assert np.array_equal(run(threaded, {"x": x[:rows]})[0], whole[:rows])


@each
def test_a_result_of_many_blocks(precision: str) -> None:
    weight = weight_of(3000, 1000) / 50
    x = rng(7).standard_normal((150, 3000), dtype=np.float32)
    (found,) = run(session(precision, weight, threads=2), {"x": x})
    if precision == "int8":
        assert np.array_equal(found, exact_int8(x, weight))
    else:
        rounded = quantize_int4(weight).dequantized().double() if precision == "int4" else weight.bfloat16().double()
        assert_near(found, bfloat16(x) @ rounded.numpy(), bound(bfloat16(x), rounded.numpy()))


@each
def test_the_residual_may_be_activated_too(precision: str) -> None:
    weight = weight_of(33, 40)
    x, residual = (rng(size).standard_normal((14, size), dtype=np.float32) for size in (33, 40))
    (plain,) = run(session(precision, weight), {"x": x})
    layer = session(precision, weight, residual=True, activation="relu", activates_sum=True)
    (found,) = run(layer, {"x": x, "residual": residual})
    assert np.array_equal(found, np.maximum(plain + residual, 0))


WINDOWS = {
    "1 × 1": linear.Window((1, 1)),
    "3 × 3": linear.Window((3, 3), pads=(1, 1, 1, 1)),
    "strides": linear.Window((3, 2), (2, 3), (1, 0, 2, 1)),
    "dilations": linear.Window((2, 3), pads=(1, 3, 0, 2), dilations=(3, 2)),
    "larger than the image": linear.Window((9, 9), pads=(4, 4, 4, 4)),
    "padding beyond the window": linear.Window((1, 2), pads=(2, 3, 3, 2)),
}


@each
@pytest.mark.parametrize("x_type", [FLOAT, BFLOAT16])
@pytest.mark.parametrize("name", WINDOWS)
def test_a_convolution_is_the_linear_layer_of_its_windows(name: str, x_type: ir.DataType, precision: str) -> None:
    window = WINDOWS[name]
    kernel = torch.from_numpy(rng(1).standard_normal((37, 5, *window.shape), dtype=np.float32))
    weight, bias = linear.conv_weight(kernel), torch.linspace(-1, 1, 37)
    for n, h, w in ((2, 6, 7), (1, 9, 5), (0, 6, 7)):
        x = rng(n, h).standard_normal((n, h, w, 5), dtype=np.float32).astype(NUMPY[x_type])
        (found,) = run(session(precision, weight, bias=bias, x_type=x_type, window=window), {"x": x})
        windows = windows_of(torch.from_numpy(x.astype(np.float32)), window)
        if precision == "int8" and math.prod(window.shape) > math.prod(window.strides):
            wanted = exact_int8_images(x.astype(np.float32), weight, window, bias)
        else:
            rows = windows.reshape(-1, weight.shape[0]).numpy().astype(NUMPY[x_type])
            (wanted,) = run(session(precision, weight, bias=bias, x_type=x_type), {"x": rows})
        assert np.array_equal(found, wanted.reshape(*windows.shape[:3], 37))


def exact_int8_images(
    x: np.ndarray, weight: torch.Tensor, window: linear.Window, bias: torch.Tensor | None = None
) -> np.ndarray:
    """Convolutions of images that have a scale and a zero point each, as their windows overlap."""
    weight_codes, scales = quantize_int8(weight)
    codes, scale, zero = quantized_rows(x.reshape(len(x), math.prod(x.shape[1:])))
    shifted = torch.from_numpy((codes - zero[:, None]).reshape(x.shape))
    sums = windows_of(shifted, window).numpy() @ weight_codes.numpy().astype(np.int64)
    products = sums.astype(np.float64) * (scales.numpy() * scale[:, None, None, None])
    return (products + (0 if bias is None else bias.numpy())).astype(np.float32)  # rounded once, as by the processor


@needs["int8"]
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_an_int8_image_that_is_not_finite_is_nan(number: float) -> None:
    layer = session("int8", weight_of(9 * 5, 40), window=linear.Window((3, 3)))
    x = rng(1).standard_normal((3, 6, 7, 5), dtype=np.float32)
    (whole,) = run(layer, {"x": x})
    x[1, 3, 2, 4] = number
    (found,) = run(layer, {"x": x})
    assert np.isnan(found[1]).all()
    assert np.array_equal(found[[0, 2]], whole[[0, 2]])


@needs["int8"]
def test_int8_images_of_many_pieces() -> None:
    window = linear.Window((3, 3), pads=(1, 1, 1, 1))
    weight = weight_of(9 * 19, 40)
    x = rng(2).standard_normal((2, 40, 37, 19), dtype=np.float32) * np.array([1, 50], np.float32).reshape(2, 1, 1, 1)
    (found,) = run(session("int8", weight, window=window, threads=2), {"x": x})
    assert np.array_equal(found, exact_int8_images(x, weight, window))


def windows_of(x: torch.Tensor, window: linear.Window) -> torch.Tensor:
    """The window at each place of the result: images × rows × columns × depth."""
    top, left, bottom, right = window.pads
    padded = F.pad(x, (0, 0, left, right, top, bottom))
    (height, width), (down, along) = window.shape, window.dilations
    windows = padded.unfold(1, (height - 1) * down + 1, window.strides[0])
    windows = windows.unfold(2, (width - 1) * along + 1, window.strides[1])[..., ::down, ::along]
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(3)


@needs["bf16"]
@pytest.mark.parametrize("name", WINDOWS)
def test_a_convolution_is_torchs(name: str) -> None:
    window = WINDOWS[name]
    x = torch.from_numpy(rng(9).standard_normal((2, 8, 7, 6), dtype=np.float32)).bfloat16()
    kernel = torch.from_numpy(rng(1).standard_normal((37, 6, *window.shape), dtype=np.float32)).bfloat16()
    layer = session("bf16", linear.conv_weight(kernel.float()), window=window)
    (found,) = run(layer, {"x": x.float().numpy()})
    top, left, bottom, right = window.pads
    images = F.pad(x.double().permute(0, 3, 1, 2), (left, right, top, bottom))
    wanted = F.conv2d(images, kernel.double(), stride=window.strides, dilation=window.dilations).permute(0, 2, 3, 1)
    assert_near(found, wanted.numpy(), np.full(wanted.shape, 1e-3))


@each
def test_images_that_do_not_fit_are_refused(precision: str) -> None:
    layer = session(precision, weight_of(45, 10), window=linear.Window((3, 3)))
    for dims in ((1, 2, 5, 5), (1, 5, 5, 4), (5, 5, 5)):
        with pytest.raises(Exception, match=r"another size|Invalid"):
            run(layer, {"x": np.ones(dims, np.float32)})


@each
def test_a_weight_may_be_a_transposed_view(precision: str) -> None:
    weight = weight_of(40, 50)
    packed = [PRECISIONS[precision].pack(w).constants for w in (weight, weight.t().contiguous().t())]
    assert all(torch.equal(packed[0][name], packed[1][name]) for name in packed[0])


@each
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 3)])
def test_operands_of_any_rank(precision: str, leading: tuple[int, ...]) -> None:
    weight = weight_of(20, 10)
    x = rng(8).standard_normal((*leading, 20), dtype=np.float32)
    (flat,) = run(session(precision, weight), {"x": x.reshape(-1, 20)})
    (found,) = run(session(precision, weight, leading=leading), {"x": x})
    assert np.array_equal(found, flat.reshape(*leading, 10))


@each
def test_no_depth_and_no_columns(precision: str) -> None:
    bias = torch.arange(5.0)
    (found,) = run(session(precision, torch.ones(0, 5), bias=bias), {"x": np.ones((3, 0), np.float32)})
    assert np.array_equal(found, np.tile(bias.numpy(), (3, 1)))
    (empty,) = run(session(precision, torch.ones(4, 0)), {"x": np.ones((3, 4), np.float32)})
    assert empty.shape == (3, 0)


@each
def test_operands_of_other_sizes_are_refused(precision: str) -> None:
    weight = weight_of(20, 10)
    wrong = PRECISIONS[precision].pack(weight_of(20, 40))
    packed = PackedWeight(20, 10, wrong.constants, wrong.block)
    x = np.ones((3, 20), np.float32)
    with pytest.raises(Exception, match="weights of a linear layer have another size"):
        run(session(precision, weight, packed=packed), {"x": x})
    with pytest.raises(Exception, match="input of a linear layer has another size"):
        run(session(precision, weight, bias=torch.ones(9)), {"x": x})
    layer = session(precision, weight, residual=True)
    with pytest.raises(Exception, match="residual of a linear layer has another size"):
        run(layer, {"x": x, "residual": np.ones((2, 10), np.float32)})


def test_a_processor_without_the_instructions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "processor", lambda: Processor("native", "x86_64", ["avx512f", "avx512bw"]))
    with pytest.raises(EngineError, match="bf16 needs a processor with avx512dq, avx512vl, avx512_bf16"):
        linear.build(PRECISIONS["bf16"], Options.of())
