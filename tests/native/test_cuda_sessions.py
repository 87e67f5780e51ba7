"""Native kernels for a GPU in sessions: which groups become kernels, and what happens where they cannot be built."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from sardonyx import MissingDependency, Options, native
from sardonyx.engines import onnxruntime as engine
from sardonyx.engines.cuda_graphs import GraphRunner
from sardonyx.engines.onnxruntime import OnnxRuntime
from sardonyx.native.partition import KernelPlan, Library, plan_kernels
from sardonyx.native.processor import Processor
from sardonyx.native.targets import TARGETS
from sardonyx.passes import Context, wants_kernels
from sardonyx.telemetry.report import GraphReport
from tests.native.cuda_on_cpu import built
from tests.native.running import difference, model_of, operators_in, run, session_of

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
CUDA = torch.device("cuda", 0)
SIZE = [64, 128]


def _plan(nodes: list[onnx.NodeProto], inputs: dict[str, Any]) -> KernelPlan:
    model = ir.from_proto(model_of(nodes, inputs, ["z"], opset=20))
    return plan_kernels(model, library=Library(TARGETS["cuda"]), min_elements=TARGETS["cuda"].min_elements)


def _gate() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["s"]),
        helper.make_node("Mul", ["x", "s"], ["a"]),
        helper.make_node("Mul", ["a", "y"], ["z"]),
    ]
    return model_of(nodes, {"x": (HALF, SIZE), "y": (HALF, SIZE)}, ["z"])


# What becomes a kernel


def test_a_gated_activation_is_one_kernel() -> None:
    plan = plan_kernels(ir.from_proto(_gate()), library=Library(TARGETS["cuda"]))
    assert plan.groups == [["Sigmoid", "Mul", "Mul"]]


def test_batch_norm_takes_the_sum_and_relu_behind_it() -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "c", "c", "c", "c"], ["n"]),
        helper.make_node("Add", ["n", "y"], ["a"]),
        helper.make_node("Relu", ["a"], ["z"]),
    ]
    image = (HALF, [2, 8, 14, 14])
    plan = _plan(nodes, {"x": image, "y": image, "c": (HALF, [8])})
    assert plan.groups == [["BatchNormalization", "Add", "Relu"]]
    assert len(plan.parts[0].kernel.nests) == 1  # the factor of a channel is no launch of its own


def test_rotary_embedding_is_one_launch() -> None:
    """Both halves of the result are computed from the same elements, which are read once."""
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2),
        helper.make_node("Neg", ["b"], ["n"]),
        helper.make_node("Concat", ["n", "a"], ["turned"], axis=-1),
        helper.make_node("Mul", ["x", "cos"], ["c"]),
        helper.make_node("Mul", ["turned", "sin"], ["s"]),
        helper.make_node("Add", ["c", "s"], ["z"]),
    ]
    plan = _plan(nodes, {"x": (HALF, [2, 4, 16, 64]), "cos": (HALF, [16, 64]), "sin": (HALF, [16, 64])})
    assert sorted(plan.groups[0]) == ["Add", "Concat", "Mul", "Mul", "Neg", "Split"]
    assert len(plan.parts[0].kernel.nests) == 1


def test_what_onnxruntime_computes_better_is_left_to_it() -> None:
    nodes = [helper.make_node("MaxPool", ["x"], ["m"], kernel_shape=[2, 2]), helper.make_node("Softmax", ["m"], ["z"])]
    model = ir.from_proto(model_of(nodes, {"x": (HALF, [1, 4, 65, 65])}, ["z"]))
    for node in model.graph:
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape([1, 4, 64, 64])
    plan = plan_kernels(model, library=Library(TARGETS["cuda"]))
    assert plan.groups == []
    assert Counter(plan.rejected.values()) == {"one kernel of onnxruntime": 1}


def test_an_operator_with_a_slow_kernel_is_worth_one_of_its_own() -> None:
    nodes = [helper.make_node("BiasGelu", ["x", "g"], ["z"], domain="com.microsoft")]
    model = ir.from_proto(model_of(nodes, {"x": (HALF, SIZE), "g": (HALF, SIZE[1:])}, ["z"]))
    (node,) = model.graph
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT16), ir.Shape(SIZE)
    assert plan_kernels(model, library=Library(TARGETS["cuda"])).groups == [["BiasGelu"]]
    assert plan_kernels(model).groups == []


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16", "FLOAT"])
def test_norms_of_sums_in_half_precision_are_native(dtype: str) -> None:
    """ONNX Runtime's round the sum before they normalize it; in single precision they are left to it."""
    elements = getattr(TensorProto, dtype)
    nodes = [helper.make_node("SkipSimplifiedLayerNormalization", ["x", "y", "g"], ["z"], domain="com.microsoft")]
    inputs = {"x": (elements, SIZE), "y": (elements, SIZE), "g": (elements, SIZE[1:])}
    model = ir.from_proto(model_of(nodes, inputs, ["z"]))
    (node,) = model.graph
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType[dtype]), ir.Shape(SIZE)
    groups = plan_kernels(model, library=Library(TARGETS["cuda"])).groups
    assert groups == ([] if dtype == "FLOAT" else [["SkipSimplifiedLayerNormalization"]])


@pytest.mark.parametrize("operator", ["Relu", "Softmax", "Tanh"])
def test_one_operator_alone_is_no_kernel(operator: str) -> None:
    assert _plan([helper.make_node(operator, ["x"], ["z"])], {"x": (HALF, SIZE)}).groups == []


def test_a_long_reduction_to_few_numbers_is_left_to_onnxruntime() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["s"]),
        helper.make_node("Tanh", ["s"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["z"], keepdims=0),
    ]
    assert _plan(nodes, {"x": (HALF, [1024, 1024])}).groups == [["Mul", "Tanh"]]


# Which sessions have them


def _context(kind: str, device: str, **options: Any) -> Context:
    return Context(kind, OnnxRuntime(), torch.device(device), Options.of(options), GraphReport(kind, 1))


@pytest.mark.parametrize(
    ("kind", "device", "wanted"),
    [
        ("inference", "cuda", True),
        ("forward", "cuda", False),
        ("backward", "cuda", False),
        ("inference", "cpu", False),
        ("forward", "cpu", True),
    ],
)
def test_by_default_inference_on_cuda_and_training_on_the_cpu_have_kernels(
    kind: str, device: str, wanted: bool
) -> None:
    assert wants_kernels(_context(kind, device)) is wanted
    assert wants_kernels(_context(kind, device, native=True))
    assert not wants_kernels(_context(kind, device, native=False))
    assert not wants_kernels(_context(kind, device, dump="folder"))


class Runner:
    """A session on a stream."""

    def __init__(self, job: Any) -> None:
        self.stream, self.placement = SimpleNamespace(device=CUDA), {}


@pytest.mark.parametrize("custom", [False, True])
def test_native_kernels_are_recorded_and_operators_of_users_are_not(
    custom: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "OnnxRuntimeRunner", Runner)
    monkeypatch.setattr(engine, "libraries_of", lambda model: [Path("custom.so")] * custom)
    job = SimpleNamespace(
        records=True, options=Options.of(), model=b"", libraries=("kernels.so",), inputs=("x",), fixed=frozenset()
    )
    assert isinstance(OnnxRuntime().load(job, None), Runner if custom else GraphRunner)  # type: ignore[arg-type]


# Building them


@pytest.fixture
def imitation() -> Iterator[None]:
    """Kernels for a GPU are built for the CPU."""
    target = replace(
        TARGETS["cuda"],
        processor=lambda name: Processor("sm_90", "x86_64", []),
        compiler_version=lambda: "",
        build=lambda source, options, processor: built(source, threads=1),
    )
    with mock.patch.dict(TARGETS, cuda=target):
        yield


@pytest.mark.usefixtures("imitation")
def test_sums_in_float32_and_their_norms_are_one_kernel() -> None:
    """It reads a product in float32, and returns the sum for the next layer without rounding it."""
    nodes = [
        helper.make_node("Cast", ["x"], ["x32"], to=FLOAT),
        helper.make_node("Add", ["product", "x32"], ["sum"]),
        helper.make_node("Cast", ["scale"], ["scale32"], to=FLOAT),
        helper.make_node("LayerNormalization", ["sum", "scale32"], ["normal"], axis=-1),
        helper.make_node("Cast", ["normal"], ["y"], to=HALF),
    ]
    inputs = {"x": (HALF, SIZE), "product": (FLOAT, SIZE), "scale": (HALF, SIZE[1:])}
    model = ir.from_proto(model_of(nodes, inputs, ["y", "sum"]))
    plan = plan_kernels(model, library=Library(TARGETS["cuda"]))
    assert [len(part.kernel.nests) for part in plan.parts] == [1]
    library = native.native(model, Options.of(), "cuda")
    assert library is not None
    draw = np.random.default_rng(0)
    feeds = {
        name: draw.standard_normal(size).astype(np.float32 if kind == FLOAT else np.float16)
        for name, (kind, size) in inputs.items()
    }
    y, total = run(session_of(ir.to_proto(model), library=library), feeds)
    expected = feeds["x"].astype(np.float32) + feeds["product"]
    np.testing.assert_array_equal(total, expected)
    moments = expected.mean(-1, keepdims=True), expected.std(-1, keepdims=True)
    normal = (expected - moments[0]) / moments[1] * feeds["scale"].astype(np.float32)
    np.testing.assert_allclose(y.astype(np.float32), normal, rtol=2e-3, atol=1e-3)


@pytest.mark.usefixtures("imitation")
def test_a_model_on_cuda_has_kernels_for_the_gpu() -> None:
    model = ir.from_proto(_gate())
    library = native.native(model, Options.of(), "cuda")
    assert library is not None
    proto = ir.to_proto(model)
    assert operators_in(proto) == ["kernel"]
    draw = np.random.default_rng(0)
    feeds = {name: draw.standard_normal(SIZE).astype(np.float16) for name in "xy"}
    (found,) = run(session_of(proto, library=library), feeds)
    x, y = (feeds[name].astype(np.float64) for name in "xy")
    assert difference(found, (x / (1 + np.exp(-x)) * y).astype(np.float16)) is None


def test_without_nvrtc_the_model_is_unchanged_and_a_warning_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> str:
        raise MissingDependency("NVRTC was not found for this test", hint="install it")

    model = ir.from_proto(_gate())
    with (
        mock.patch.dict(TARGETS, cuda=replace(TARGETS["cuda"], compiler_version=missing)),
        caplog.at_level(logging.WARNING),
    ):
        assert native.native(model, Options.of(), "cuda") is None
        assert native.native(model, Options.of(), "cuda") is None
        with pytest.raises(MissingDependency, match="NVRTC was not found"):
            native.native(model, Options.of(native=True), "cuda")
    assert [node.op_type for node in model.graph] == ["Sigmoid", "Mul", "Mul"]
    assert [record.message.partition("\n")[0] for record in caplog.records] == [
        "no native kernels: NVRTC was not found for this test"
    ]
