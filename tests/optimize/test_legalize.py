"""Kernels that an engine lacks: found before a session is built, or else the region runs in torch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import sardonyx
from sardonyx.engines import ortvalue
from sardonyx.engines.onnxruntime import _kernels, _session_error
from sardonyx.engines.registry import find
from sardonyx.errors import MissingKernel
from sardonyx.optimize.legalize import Kernels, legalize, unsupported_reason
from sardonyx.telemetry.report import collecting

OPSET = 23


def kernels() -> Kernels:
    found = find("onnxruntime").kernels(torch.device("cpu"))
    assert found is not None
    return found


def node(op_type: str, dtype: ir.DataType, inputs: int = 1, **attributes: int) -> ir.Node:
    values = [ir.Value(name=f"x{i}", type=ir.TensorType(dtype), shape=ir.Shape((2, 4, 3))) for i in range(inputs)]
    made = ir.node(op_type, values, attributes)
    made.outputs[0].name, made.outputs[0].type = "y", ir.TensorType(dtype)
    return made


def widened(made: ir.Node) -> ir.DataType | None:
    """The dtype that a node computes in after legalization."""
    inputs = [x for x in made.inputs if x is not None]
    graph = ir.Graph(inputs, made.outputs, nodes=[made], opset_imports={"": OPSET}, name="g")
    legalize(ir.Model(graph, ir_version=10), kernels())
    assert made.inputs[0] is not None
    return made.inputs[0].dtype


def test_a_provider_that_does_not_list_its_kernels_has_inexact_ones_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the CUDA provider: its ReduceMax of int64 computes in double precision."""

    def lists_none(provider: str) -> None:
        raise RuntimeError(f"No devices found for EP {provider}")

    monkeypatch.setattr(ortvalue.binding(), "get_registered_ep_kernel_defs", lists_none)
    _kernels.cache_clear()
    unlisted = find("onnxruntime").kernels(torch.device("cuda"))
    _kernels.cache_clear()
    made = node("ReduceMax", ir.DataType.INT64, keepdims=1)
    graph = ir.Graph(made.inputs, made.outputs, nodes=[made], opset_imports={"": OPSET}, name="g")
    assert unlisted is not None
    legalize(ir.Model(graph, ir_version=10), unlisted)
    assert "ReduceMax" not in {found.op_type for found in graph}


class TestFunctions:
    """Operators without a kernel, in whose place an engine runs the nodes that ONNX defines them by."""

    @pytest.mark.parametrize("op_type", ["HardSwish", "Mish"])
    def test_a_body_without_kernels_for_a_dtype_lacks_it(self, op_type: str) -> None:
        assert unsupported_reason(node(op_type, ir.DataType.DOUBLE), OPSET, kernels()) is not None
        assert unsupported_reason(node(op_type, ir.DataType.FLOAT), OPSET, kernels()) is None

    @pytest.mark.parametrize("op_type", ["HardSwish", "Mish"])
    def test_a_body_with_kernels_for_a_wider_dtype_is_computed_in_that(self, op_type: str) -> None:
        assert unsupported_reason(node(op_type, ir.DataType.BFLOAT16), OPSET, kernels()) is None
        assert widened(node(op_type, ir.DataType.BFLOAT16)) == ir.DataType.FLOAT

    def test_a_body_that_depends_on_attributes(self) -> None:
        made = node("GroupNormalization", ir.DataType.BFLOAT16, inputs=3, num_groups=2)
        assert widened(made) == ir.DataType.FLOAT


class TestKernelsThatNoTableToldOf:
    """Where the table of kernels promises too much, as here where it promises everything."""

    @pytest.fixture(autouse=True)
    def promised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Kernels, "accepts", lambda *ignored: True)
        monkeypatch.setattr(Kernels, "expands", lambda *ignored: False)
        torch._dynamo.reset()

    @staticmethod
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.erf(x) + 1
        return y, y.argmax(0)

    def test_the_region_runs_in_torch_and_warns_once(self, caplog: pytest.LogCaptureFixture) -> None:
        compiled, x = torch.compile(self.model, backend="sardonyx"), torch.randn(3, 4, dtype=torch.float64)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                torch.testing.assert_close(compiled(x), self.model(x), rtol=0, atol=0)
        assert sum("in torch: a region" in record.message for record in caplog.records) == 1

    def test_the_report_names_its_operators(self) -> None:
        report = sardonyx.explain(self.model, torch.randn(3, 4, dtype=torch.float64))
        operators = [fallback.operator for fallback in report.fallbacks]
        assert operators == ["aten.erf.default", "aten.add.Tensor", "aten.argmax.default"]
        assert all("Erf" in fallback.reason for fallback in report.fallbacks)

    def test_it_is_an_error_where_fallbacks_are(self) -> None:
        compiled = torch.compile(self.model, backend="sardonyx", options={"fallback": "error"})
        with pytest.raises(MissingKernel, match="Erf"):
            compiled(torch.randn(3, 4, dtype=torch.float64))


class TestInexactKernels:
    """Kernels of int64 that compute in fewer than 64 bits are composed from others."""

    @staticmethod
    def legalized(op_type: str, dtype: ir.DataType, sizes: tuple[int, ...], inexact: str) -> list[str]:
        x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(sizes))
        made = ir.node(op_type, [x])
        made.outputs[0].name, made.outputs[0].type = "y", ir.TensorType(dtype)
        graph = ir.Graph([x], made.outputs, nodes=[made], opset_imports={"": OPSET}, name="g")
        legalize(ir.Model(graph, ir_version=10), Kernels({}, inexact_int64=frozenset({inexact})))
        assert graph.outputs[0].name == "y"
        return [node.op_type for node in graph]

    def test_a_reduction_takes_the_first_element_along_each_axis(self) -> None:
        assert self.legalized("ReduceMax", ir.DataType.INT64, (4, 5), "ReduceMax") == ["TopK", "TopK", "Identity"]

    def test_exact_kernels_stay(self) -> None:
        assert self.legalized("Sign", ir.DataType.INT64, (4, 5), "ReduceMax") == ["Sign"]

    def test_other_dtypes_stay(self) -> None:
        assert self.legalized("Sign", ir.DataType.INT32, (4, 5), "Sign") == ["Sign"]

    def test_a_single_element_stays(self) -> None:
        assert self.legalized("Sign", ir.DataType.INT64, (1,), "Sign") == ["Sign"]


def test_a_node_that_no_provider_takes_is_a_missing_kernel() -> None:
    text = "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: transformer_memcpy.cc:297 "
    error = _session_error(RuntimeError(text + "!node_provider_type.empty() was false. Node 'Abs_1' has no kernel"))
    assert isinstance(error, MissingKernel)


SMALL = torch.tensor([-80.0, -30.0, -18.0, -14.0, -1.0, 0.0, 5.0, 30.0])


@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        lambda x: torch.sigmoid(x).log(),
        lambda x: 1 / torch.sigmoid(x).reshape(2, 4),
        lambda x: torch.sigmoid(x) > 1e-20,
        lambda x: ((x - 1) * torch.sigmoid(x)).reciprocal(),
        lambda x: 2 / ((x - 1) * torch.sigmoid(x)),
        lambda x: torch.nn.functional.silu(x) < 0,
    ],
    ids=["result", "logarithm", "quotient", "comparison", "reciprocal of a product", "quotient by a product", "silu"],
)
def test_a_sigmoid_of_a_large_negative_number_is_not_zero(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """ONNX Runtime's kernel returns 0 below -18."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    compiled = torch.compile(Model(), backend="sardonyx", options={"fallback": "error"})
    program = sardonyx.export(Model(), (SMALL,))
    for result in (compiled(SMALL), program(SMALL)):
        torch.testing.assert_close(result, function(SMALL), rtol=1e-6, atol=0)


@pytest.mark.parametrize("function", [torch.sin, torch.cos, torch.sinc, lambda x: 1 / torch.sin(x).reshape(-1, 2)])
def test_sines_and_cosines_of_doubles_have_their_digits_near_their_zeros(function: Callable[..., torch.Tensor]) -> None:
    """ONNX Runtime's kernels subtract a rounded multiple of π."""
    zeros = torch.arange(1, 101, dtype=torch.float64) * (torch.pi / 2)
    x = torch.cat([zeros, -zeros, zeros * 5000 + 1e-9, zeros + 1e9, torch.linspace(-1, 1, 18, dtype=torch.float64)])
    compiled = torch.compile(function, backend="sardonyx", options={"fallback": "error"})
    torch.testing.assert_close(compiled(x), function(x), rtol=1e-14, atol=0)


def test_sines_and_cosines_of_doubles_at_limits() -> None:
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**20, 1e300, 5e-324], dtype=torch.float64)
    compiled = torch.compile(lambda x: (x.sin(), x.cos(), x.sin().signbit()[:2]), backend="sardonyx")
    expected = (x.sin(), x.cos(), torch.tensor([False, True]))
    for result, wanted in zip(compiled(x), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-14, atol=0, equal_nan=True)


def test_a_sine_that_only_scales_is_the_engines() -> None:
    with collecting() as report:
        rotate = torch.compile(lambda x, y: torch.sin(x) * y + torch.cos(x), backend="sardonyx")
        rotate(torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    assert report.operators["Sin"] == 1


def test_a_gate_keeps_the_engines_sigmoid() -> None:
    with collecting() as report:
        gate = torch.compile(lambda x, y: torch.sigmoid(x).t() * y.t(), backend="sardonyx")
        gate(torch.randn(2, 3), torch.ones(2, 3))
    assert report.operators["Sigmoid"] == 1


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("numpy_dtype", [np.float32, np.float64])
def test_extrema_of_infinities_by_a_kernel_that_loses_them(op_type: str, keepdims: int, numpy_dtype: type) -> None:
    """As cuDNN's, which starts at the lowest or highest finite number; here Max or Min does that to the result."""
    dtype = ir.DataType.from_numpy(np.dtype(numpy_dtype))
    limits = np.finfo(numpy_dtype)
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(("n", 3)))
    axes = ir.Value(name="axes", const_value=ir.tensor(np.array([1]), name="axes"))
    limit = limits.min if op_type == "ReduceMax" else limits.max
    bound = ir.Value(name="limit", const_value=ir.tensor(limit, name="limit"))
    reduced = ir.node(op_type, [x, axes], {"keepdims": keepdims})
    reduced.outputs[0].name, reduced.outputs[0].type = "y", ir.TensorType(dtype)
    graph = ir.Graph(
        [x], reduced.outputs, nodes=[reduced], initializers=[axes, bound], opset_imports={"": OPSET}, name="g"
    )
    model = ir.Model(graph, ir_version=10)
    legalize(model, Kernels({}, loses_infinity=frozenset({op_type})))
    loses = ir.node(op_type.removeprefix("Reduce"), [reduced.outputs[0], bound])
    loses.outputs[0].name, loses.outputs[0].type = "bounded", ir.TensorType(dtype)
    ir.convenience.replace_all_uses_with(reduced.outputs[0], loses.outputs[0])
    loses.replace_input_with(0, reduced.outputs[0])
    graph.insert_after(reduced, loses)
    inf, nan = np.inf, np.nan
    rows = [[-inf] * 3, [inf] * 3, [-inf, nan, -inf], [inf, nan, inf], [-inf, limits.min, -inf], [inf, limits.max, inf]]
    given = np.array([*rows, [1, -inf, inf], [3, 1, 2]], numpy_dtype)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": given})
    expected = (np.max if op_type == "ReduceMax" else np.min)(given, axis=1, keepdims=bool(keepdims))
    clean = ~np.isnan(expected)  # the kernel on the CPU, unlike cuDNN's, skips NaN
    np.testing.assert_array_equal(result[clean], expected[clean])


def test_a_maximum_after_relu_needs_no_correction() -> None:
    relu = node("Relu", ir.DataType.FLOAT)
    reduced = ir.node("ReduceMax", relu.outputs, {"keepdims": 1})
    reduced.outputs[0].name, reduced.outputs[0].type = "z", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(relu.inputs, reduced.outputs, nodes=[relu, reduced], opset_imports={"": OPSET}, name="g")
    legalize(ir.Model(graph, ir_version=10), Kernels({}, loses_infinity=frozenset({"ReduceMax"})))
    assert [made.op_type for made in graph] == ["Relu", "ReduceMax"]


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_a_float_becomes_uint8_through_int64_where_the_cast_saturates(dtype: ir.DataType) -> None:
    cast = node("Cast", dtype, to=int(ir.DataType.UINT8))
    cast.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    graph = ir.Graph(cast.inputs, cast.outputs, nodes=[cast], opset_imports={"": OPSET}, name="g")
    legalize(ir.Model(graph, ir_version=10), Kernels({}, uint8_casts_saturate=True, joins_casts=True))
    assert [(made.op_type, made.outputs[0].dtype) for made in graph] == [
        ("Cast", ir.DataType.INT64),
        ("Max", ir.DataType.INT64),  # keeps ONNX Runtime from fusing the casts
        ("Cast", ir.DataType.UINT8),
    ]


@pytest.mark.parametrize(
    ("attributes", "operators"),
    [
        ({"strides": [2, 2], "dilations": [1, 1]}, ["Relu", "MaxPool", "AveragePool", "IsNaN", "Where"]),
        ({"dilations": [2, 2]}, ["Relu", "MaxPool", "MaxPool"]),
        ({"ceil_mode": 1}, ["Relu", "MaxPool", "MaxPool"]),
    ],
)
def test_nan_of_a_maximum_after_relu_is_that_of_an_average_of_the_same_windows(
    attributes: dict[str, object], operators: list[str]
) -> None:
    relu = node("Relu", ir.DataType.FLOAT)
    pool = ir.node("MaxPool", relu.outputs, {"kernel_shape": [2, 2], **attributes})
    pool.outputs[0].name, pool.outputs[0].type = "z", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(relu.inputs, pool.outputs, nodes=[relu, pool], opset_imports={"": OPSET}, name="g")
    legalize(ir.Model(graph, ir_version=10), Kernels({}, loses_infinity=frozenset({"MaxPool"}), pool_skips_nan=True))
    pooling = ("Relu", "MaxPool", "AveragePool")
    kept = [made.op_type for made in graph if made.op_type in pooling or "AveragePool" in operators]
    assert kept == operators


@pytest.mark.parametrize("zeros", [torch.zeros(1), torch.zeros(1, 1), -torch.zeros(1)])
def test_a_zero_that_is_added_keeps_its_dimensions(zeros: torch.Tensor) -> None:
    for function in (lambda x: (x @ x) + zeros, lambda x: (x @ x) - zeros, lambda x: (x @ x).double() + zeros):
        program = sardonyx.export(function, (torch.ones(4),))
        torch.testing.assert_close(program(torch.ones(4)), function(torch.ones(4)))
