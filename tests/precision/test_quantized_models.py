"""Models that are quantized already run in integers, and their numbers are those of eager within one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
import torch.nn.functional as F

import sardonyx

Tensor = torch.Tensor
quantized = torch.ops.quantized_decomposed
STEP = 0.05


def codes_of(x: Tensor, scale: float = STEP, zero: int = 120) -> Tensor:
    return quantized.quantize_per_tensor(x, scale, zero, 0, 255, torch.uint8)


def real(codes: Tensor, scale: float = STEP) -> Tensor:
    return quantized.dequantize_per_tensor(codes, scale, 120, 0, 255, torch.uint8)


class Weights(torch.nn.Module):
    """A weight of int8 with a scale for each output."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("codes", torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8))
        self.register_buffer("scales", torch.rand(shape[0], generator=generator) / 1000 + 1e-4)
        self.register_buffer("zeros", torch.zeros(shape[0], dtype=torch.int64))
        self.bias = torch.nn.Parameter(torch.randn(shape[0], generator=generator))

    def real(self) -> Tensor:
        return quantized.dequantize_per_channel(self.codes, self.scales, self.zeros, 0, -127, 127, torch.int8)


class Model(torch.nn.Module):
    """A function of x and weights."""

    def __init__(self, function: Callable[[Tensor, Weights], Tensor], *shape: int) -> None:
        super().__init__()
        self.weights, self._function = Weights(*shape), function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self.weights)


def compiled(model: torch.nn.Module, x: Tensor, folder: Path, **options: Any) -> tuple[Tensor, Counter[str]]:
    """The result, and the operators that ONNX Runtime runs after its own rewrites."""
    torch._dynamo.reset()
    path = folder / "runs.onnx"
    options |= {"fallback": "error", "session_options": {"optimized_model_filepath": str(path)}}
    with torch.no_grad():
        result = torch.compile(model, backend="sardonyx", options=options)(x)
    return result, Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def x_of(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def linear(x: Tensor, w: Weights) -> Tensor:
    return F.linear(real(codes_of(x)), w.real(), w.bias)


@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (2, 3, 64)])
def test_a_linear_layer_is_a_product_of_integers(shape: tuple[int, ...], tmp_path: Path) -> None:
    model, x = Model(linear, 32, 64), x_of(*shape)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert runs["MatMulIntegerToFloat"] == 1
    assert not runs.keys() & {"Gemm", "MatMul", "DequantizeLinear", "FusedMatMul"}


def test_a_linear_layer_between_codes_returns_codes(tmp_path: Path) -> None:
    def between_codes(x: Tensor, w: Weights) -> Tensor:
        return codes_of(F.relu(linear(x, w)), zero=0)

    model, x = Model(between_codes, 32, 64), x_of(5, 64)
    result, runs = compiled(model, x, tmp_path)
    assert (result.int() - model(x).int()).abs().max() <= 1
    assert set(runs) == {"QuantizeLinear", "QGemm"}


def test_a_layer_without_bias_between_codes_is_a_product_of_integers(tmp_path: Path) -> None:
    def without_bias(x: Tensor, w: Weights) -> Tensor:
        return codes_of(F.linear(real(codes_of(x)), w.real()))

    model = Model(without_bias, 32, 64)
    for x in (x_of(5, 64), x_of(2, 3, 64)):
        result, runs = compiled(model, x, tmp_path)
        assert (result.int() - model(x).int()).abs().max() <= 1
        assert sum(runs[name] for name in ("MatMulIntegerToFloat", "QGemm", "QLinearMatMul")) == 1
        assert not runs.keys() & {"Gemm", "MatMul", "FusedMatMul", "FusedGemm"}


def test_a_bound_that_codes_do_not_have_is_computed(tmp_path: Path) -> None:
    def with_negative_codes(x: Tensor, w: Weights) -> Tensor:
        return codes_of(F.relu(linear(x, w)))

    model, x = Model(with_negative_codes, 32, 64), x_of(5, 64)
    result, runs = compiled(model, x, tmp_path)
    assert (result.int() - model(x).int()).abs().max() <= 1
    assert runs["MatMulIntegerToFloat"] == 1


def test_a_layer_whose_scale_is_chosen_in_each_call(tmp_path: Path) -> None:
    def dynamic(x: Tensor, w: Weights) -> Tensor:
        scale, zero = quantized.choose_qparams.tensor(x, 0, 255, 2**-12, torch.uint8)
        codes = quantized.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        x = quantized.dequantize_per_tensor.tensor(codes, scale, zero, 0, 255, torch.uint8)
        return F.linear(x, w.real(), w.bias)

    model, x = Model(dynamic, 32, 64), x_of(5, 64)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert runs["MatMulIntegerToFloat"] == 1
    assert "DequantizeLinear" not in runs


def test_a_convolution_between_codes_is_one_of_integers(tmp_path: Path) -> None:
    def convolution(x: Tensor, w: Weights) -> Tensor:
        return codes_of(F.relu(F.conv2d(real(codes_of(x)), w.real(), w.bias, padding=1)), zero=0)

    model, x = Model(convolution, 16, 16, 3, 3), x_of(2, 16, 24, 24)
    result, runs = compiled(model, x, tmp_path)
    assert (result.int() - model(x).int()).abs().max() <= 1
    assert runs["QLinearConv"] == 1
    assert "Conv" not in runs


def test_products_of_activations_are_of_integers(tmp_path: Path) -> None:
    class Scores(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return real(codes_of(x)) @ real(codes_of(x * 0.7)).transpose(-1, -2)

    x = x_of(2, 3, 8, 16)
    result, runs = compiled(Scores(), x, tmp_path)
    torch.testing.assert_close(result, Scores()(x), rtol=1e-5, atol=1e-5)
    assert runs["MatMulIntegerToFloat"] == 1


def test_weights_that_meet_floating_point_are_dequantized_once(tmp_path: Path) -> None:
    def only_weights(x: Tensor, w: Weights) -> Tensor:
        return F.linear(x, w.real(), w.bias)

    model, x = Model(only_weights, 32, 64), x_of(5, 64)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert set(runs) == {"Gemm"}


def test_a_layer_in_floating_point_between_codes_stays_so(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return codes_of(self.layer(real(codes_of(x))), 0.01)

    model, x = Layer(), x_of(5, 64)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=0, atol=1)
    assert (result != model(x)).float().mean() < 0.01
    assert runs["Gemm"] == 1


class DynamicRows(Weights):
    """A layer as torchao computes it: codes of each row of x, and products of bytes."""

    over: Sequence[int] = (1,)
    """The axes that have a scale together."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        extremes = torch.clamp(rows.amin(self.over, True), max=0), torch.clamp(rows.amax(self.over, True), min=0)
        scales = torch.clamp(torch.maximum(-extremes[0], extremes[1]) / 127.5, torch.finfo(torch.float32).eps)
        zeros = torch.full_like(scales, 0).to(torch.int8)
        codes = torch.clamp(torch.round(rows * (1.0 / scales)) + zeros, -128, 127).to(torch.int8)
        weight = self.codes.t()
        sums = torch._int_mm((codes.to(torch.int32) + 128).to(torch.uint8), weight)
        sums = sums - weight.sum(dim=0, keepdim=True, dtype=torch.int32) * 128
        return (sums.to(torch.float32) * scales * self.scales + self.bias).reshape(*x.shape[:-1], -1)


@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (2, 3, 64)])
def test_rows_that_are_quantized_in_each_call(shape: tuple[int, ...], tmp_path: Path) -> None:
    model, x = DynamicRows(32, 64), x_of(*shape)
    x.view(-1, 64)[0] = 0
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert runs["QuantizeLinear"] == runs["MatMulIntegerToFloat"] == 1
    assert not runs.keys() & {"Round", "Clip", "MatMulInteger", "Sub", "Cast"}


def test_tensors_that_are_quantized_in_each_call(tmp_path: Path) -> None:
    model, x = DynamicRows(32, 64), x_of(2, 3, 64)
    model.over = (0, 1)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert runs["QuantizeLinear"] == runs["MatMulIntegerToFloat"] == 1
    assert not runs.keys() & {"Round", "Clip", "MatMulInteger", "Sub", "Cast"}


def test_rows_of_any_number(tmp_path: Path) -> None:
    model = DynamicRows(32, 64)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="sardonyx", dynamic=True, options={"fallback": "error"})
    for count in (5, 1, 17):
        with torch.no_grad():
            torch.testing.assert_close(fast(x_of(count, 64)), model(x_of(count, 64)), rtol=1e-5, atol=1e-5)


def test_a_row_with_nan_is_nan_and_others_are_not(tmp_path: Path) -> None:
    model, x = DynamicRows(32, 64), x_of(3, 64)
    x[1, 7] = torch.nan
    result, _ = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_weights_of_4_bits_stay_in_4_bits(tmp_path: Path) -> None:
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.randint(0, 16, (80, 128), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
            self.register_buffer("codes", torch._convert_weight_to_int4pack_for_cpu(codes, 1))
            self.register_buffer("parameters_of_groups", torch.rand(4, 80, 2) / 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch._weight_int4pack_mm_for_cpu(x, self.codes, 32, self.parameters_of_groups)

    model, x = Packed(), x_of(3, 128)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    assert runs["MatMulNBits"] == 1
    assert not runs.keys() & {"DequantizeLinear", "Cast", "BitwiseAnd", "BitShift"}


# Files


def test_a_file_has_standard_operators_that_onnx_runtime_computes_in_integers(tmp_path: Path) -> None:
    def between_codes(x: Tensor, w: Weights) -> Tensor:
        return codes_of(F.relu(linear(x, w)), zero=0)

    model, x = Model(between_codes, 32, 64).eval(), x_of(5, 64)
    program = sardonyx.export(model, (x,))
    assert {node.domain for node in program.model.graph} == {""}
    onnx.checker.check_model(program.proto(), full_check=True)
    assert (program(x).int() - model(x).int()).abs().max() <= 1


def test_a_file_dequantizes_weights_that_meet_floating_point_exactly(tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes = torch.randint(-128, 128, (64, 32), generator=torch.Generator().manual_seed(0))
            self.register_buffer("codes", codes.to(torch.int8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ quantized.dequantize_per_tensor(self.codes, 0.01, 0, -128, 127, torch.int8)

    model, x = Scaled().eval(), x_of(5, 64)
    program = sardonyx.export(model, (x,))
    result, runs = run_in_onnxruntime(program.proto(), x, tmp_path)
    torch.testing.assert_close(torch.from_numpy(result), model(x), rtol=1e-5, atol=1e-5)
    assert set(runs) == {"MatMul"}


@pytest.fixture(scope="module")
def qdq_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small convolutional network with a residual, quantized by ONNX Runtime's tool, per channel."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(3, 8, 3, padding=1)
            self.second = torch.nn.Conv2d(8, 8, 3, padding=1)
            self.last = torch.nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.first(x))
            y = F.relu(self.second(y) + y)
            return F.softmax(self.last(F.max_pool2d(y, 16).flatten(1)) * 3, -1)

    class Samples(CalibrationDataReader):  # type: ignore[misc]  # untyped
        def __init__(self) -> None:
            self._left = [{"x": x_of(1, 3, 16, 16).numpy()}] * 2

        def get_next(self) -> Any:
            return self._left.pop() if self._left else None

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("qdq")
    sardonyx.export(Network().eval(), (x_of(1, 3, 16, 16),)).save(folder / "float.onnx")
    types = {"weight_type": QuantType.QInt8, "activation_type": QuantType.QUInt8}
    arguments = {"quant_format": QuantFormat.QDQ, "per_channel": True, **types}
    quantize_static(folder / "float.onnx", folder / "qdq.onnx", Samples(), **arguments)
    return folder / "qdq.onnx"


def run_in_onnxruntime(
    model: onnx.ModelProto, x: Tensor, folder: Path, libraries: Any = ()
) -> tuple[Any, Counter[str]]:
    """The result of a session with default options, and the operators that it runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "runs.onnx")
    for library in libraries:
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    (result,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return result, Counter(node.op_type for node in onnx.load(folder / "runs.onnx").graph.node)


def test_a_quantized_file_keeps_its_integers_bit_by_bit(qdq_file: Path, tmp_path: Path) -> None:
    x, stock = x_of(1, 3, 16, 16), onnx.load(qdq_file)
    expected, before = run_in_onnxruntime(stock, x, tmp_path)
    program = sardonyx.optimize(qdq_file)
    result, after = run_in_onnxruntime(program.proto(), x, tmp_path)
    torch.testing.assert_close(torch.from_numpy(result), torch.from_numpy(expected), rtol=0, atol=0)
    torch.testing.assert_close(program(x), torch.from_numpy(expected), rtol=0, atol=0)
    integers = {name: count for name, count in before.items() if name.startswith("QLinear")}
    assert integers["QLinearConv"] == 2
    assert integers.items() <= after.items()


def test_native_kernels_leave_integers_to_onnx_runtime(qdq_file: Path) -> None:
    program = sardonyx.optimize(qdq_file, native=True)
    operators = Counter(node.op_type for node in program.model.graph)
    conversions = Counter(node.op_type for node in ir.load(qdq_file).graph)
    assert operators["Conv"] == 2
    assert operators["DequantizeLinear"] >= conversions["DequantizeLinear"] - 1
    expected = sardonyx.optimize(qdq_file)(x_of(1, 3, 16, 16))
    torch.testing.assert_close(program(x_of(1, 3, 16, 16)), expected, rtol=1e-5, atol=1e-6)


# torchao


def test_a_layer_that_torchao_quantized_is_a_product_of_integers(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)).eval()
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    x = x_of(5, 64)
    result, runs = compiled(model, x, tmp_path)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
    assert runs["MatMulInteger"] + runs["MatMulIntegerToFloat"] == 2
    assert not runs.keys() & {"Gemm", "MatMul"}
