"""Kernels for a GPU: built by NVRTC where it is, and run on the CPU under an imitation of CUDA everywhere."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from benchmarks.native_cuda import Case, error
from benchmarks.native_regions import REGIONS
from onnx import TensorProto, helper

from sardonyx import MissingDependency, OptionError, Options, native
from sardonyx.errors import CompilerError
from sardonyx.native import processor
from sardonyx.native.partition import Library, plan_kernels
from sardonyx.native.targets import TARGETS
from sardonyx.toolchain import compiler, nvrtc
from tests.native import node_tests, random
from tests.native.cuda_on_cpu import OnCpu, imitated
from tests.native.running import Feeds, difference, model_of, run, session_of


def _has_nvrtc() -> bool:
    try:
        return bool(nvrtc.find())
    except MissingDependency:
        return False


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="there is no NVRTC: pip install nvidia-cuda-nvrtc")
FLOAT, HALF, BFLOAT, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64


def _chain(kind: int = HALF) -> onnx.ModelProto:
    nodes = [helper.make_node("Tanh", ["x"], ["y"], name="tanh"), helper.make_node("Sigmoid", ["y"], ["z"], name="s")]
    return model_of(nodes, {"x": (kind, ["rows", 64])}, ["z"])


# On the CPU


def test_regions_compute_what_double_precision_says() -> None:
    """In single and in half precision."""
    together, cases = OnCpu(), {region.name: Case(region) for region in REGIONS}
    for name, case in cases.items():
        assert together.add(name, case.region.model()) is None
        assert together.add(f"{name} in half", case.model) is None
    together.build()
    for name, case in cases.items():
        found = together.run(name, case.region.feeds())[0]
        assert error(torch.from_numpy(found), case.region.wanted()[0]) < 1e-6, name
        found = together.run(f"{name} in half", case.feeds)[0]
        assert error(torch.from_numpy(found), case.exact()) < 1e-3, name


def test_random_graphs_agree_with_onnxruntime_and_with_double_precision() -> None:
    """`python -m tests.native.cuda_on_cpu` runs more of them."""
    with imitated(threads=1):
        outcome, smallest = random.batch(1, 12)
    assert not outcome.failures, smallest


def test_some_node_tests_of_onnx_give_what_is_expected() -> None:
    """One of every fourth operator, and every other one with a symbol for each size; `make native-checks` runs all."""
    last = {case.node.op_type: case for case in node_tests.cases() if case.node.op_type not in _PRODUCTS}
    chosen = [node_tests.symbolic(case) if i % 2 else case for i, case in enumerate(list(last.values())[::4])]
    with imitated(threads=1):
        assert node_tests.compare(chosen, quickly=True) == []


_PRODUCTS = {"MatMul", "Gemm", "Conv"}

_ROWS = {
    "short rows, several to a warp": (FLOAT, ("n", 12), (21, 12)),
    "a row for each part of a warp, in 16 bytes": (HALF, ("n", 40), (9, 40)),
    "rows that a block holds in one piece": (FLOAT, (3, 150), (3, 150)),
    "rows that a block holds in several pieces": (HALF, (2, "n"), (2, 1000)),
    "rows of a length that is no multiple": (HALF, (2, "n"), (2, 333)),
    "rows that are too long to be held": (FLOAT, (2, "n"), (2, 2501)),
}


@pytest.mark.parametrize("case", _ROWS)
def test_threads_share_rows(case: str) -> None:
    """Softmax and LayerNorm after each other, by blocks of up to 64 threads that wait for each other."""
    kind, dims, shape = _ROWS[case]
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["squares"]),
        helper.make_node("Softmax", ["squares"], ["shares"], axis=-1),
        helper.make_node("LayerNormalization", ["x", "gain"], ["normal"], axis=-1),
        helper.make_node("Add", ["shares", "normal"], ["z"]),
        helper.make_node("ReduceMax", ["z", "axes"], ["most"], keepdims=0),
    ]
    constants = {"axes": np.array([-1])}
    model = model_of(nodes, {"x": (kind, dims), "gain": (kind, dims[1:])}, ["z", "most"], constants)
    draw = np.random.default_rng(0)
    numbers = np.float16 if kind == HALF else np.float32
    feeds = {"x": draw.standard_normal(shape).astype(numbers), "gain": draw.standard_normal(shape[1:]).astype(numbers)}
    _compare(model, feeds, threads=64)


def test_threads_share_rows_that_lie_side_by_side() -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["shares"], axis=1),
        helper.make_node("ReduceSum", ["x", "axes"], ["sums"], keepdims=0),
    ]
    model = model_of(nodes, {"x": (FLOAT, [3, "n", 37])}, ["shares", "sums"], {"axes": np.array([0, 1])})
    _compare(model, {"x": np.random.default_rng(0).standard_normal((3, 29, 37)).astype(np.float32)}, threads=64)


def _compare(model: onnx.ModelProto, feeds: Feeds, *, threads: int = 1) -> None:
    together = OnCpu(threads=threads)
    assert together.add("model", model) is None
    together.build()
    for found, wanted in zip(together.run("model", feeds), run(session_of(model), feeds), strict=True):
        assert difference(found, wanted) is None


def test_memory_that_is_not_aligned_is_read_one_by_one() -> None:
    together = OnCpu()
    assert together.add("model", _chain(FLOAT)) is None
    together.build()
    x = np.random.default_rng(0).standard_normal(3 * 64 + 1).astype(np.float32)[1:].reshape(3, 64)
    assert x.ctypes.data % 16
    found = together.run("model", {"x": x})[0]
    assert difference(found, run(session_of(_chain(FLOAT)), {"x": x})[0]) is None


def test_an_index_beyond_the_end_reads_zero() -> None:
    model = model_of([helper.make_node("Gather", ["x", "i"], ["y"])], {"x": (FLOAT, [4]), "i": (INT64, [3])}, ["y"])
    together = OnCpu()
    assert together.add("model", model) is None
    together.build()
    found = together.run("model", {"x": np.arange(1, 5, dtype=np.float32), "i": np.array([9, -1, -7])})[0]
    assert found.tolist() == [0, 4, 0]


# Built by NVRTC


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_regions_and_random_graphs_are_built(architecture: str) -> None:
    library = Library(TARGETS["cuda"])
    for region in REGIONS:
        assert plan_kernels(ir.from_proto(Case(region).model), choice="all", library=library).parts
    graphs: list[random.Graph] = []
    random.drawn(0, 8, graphs.append)
    for graph in graphs:
        plan_kernels(ir.from_proto(graph.model), choice="all", library=library)
    image = nvrtc.find().compile(library.source, architecture)
    assert image.cubin.startswith(b"\x7fELF")
    assert f".target {architecture}".encode() in image.ptx
    assert image.ptx.count(b".entry") >= len(REGIONS)


@needs_nvrtc
def test_a_kernel_of_every_operator_is_built() -> None:
    library = Library(TARGETS["cuda"])
    for case in {case.node.op_type: case for case in node_tests.cases()}.values():
        plan_kernels(ir.from_proto(case.model), choice="all", library=library)
    assert nvrtc.find().compile(library.source, "sm_90").cubin


@needs_nvrtc
def test_a_library_is_built_without_nvcc_or_headers_of_cuda(tmp_path: Path) -> None:
    source = native.generate(_chain(), target="cuda").source
    built = compiler.build_cuda_library(source, Options.of({"cache_dir": str(tmp_path)}), architecture="sm_80")
    assert built.with_name("kernels.cpp").read_text() == source
    needed = subprocess.run(["ldd", str(built)], capture_output=True, text=True, check=True).stdout
    assert "libcuda" not in needed


@needs_nvrtc
@pytest.mark.parametrize("kind", [HALF, FLOAT])
def test_fast_instructions_are_for_narrow_results_only(kind: int) -> None:
    image = nvrtc.find().compile(native.generate(_chain(kind), target="cuda").source, "sm_90")
    assert (b"div.full.f32" in image.ptx) == (kind == HALF)
    assert (b"ld.global.nc.v4" in image.ptx) or (b"ld.global.v4" in image.ptx)


@needs_nvrtc
def test_a_mistake_in_device_code_is_shown() -> None:
    with pytest.raises(CompilerError, match=r"(?s)NVRTC.*failed for sm_80.*mistake"):
        nvrtc.find().compile("__global__ void kernel() { mistake; }", "sm_80")


@needs_nvrtc
def test_a_compiled_folder_says_what_it_is_for(tmp_path: Path) -> None:
    compiled = native.compile(_chain(), target="cuda", processor="sm_90", cache_dir=str(tmp_path / "cache"))
    told = json.loads((compiled.save(tmp_path / "compiled") / "manifest.json").read_text())
    assert (told["target"], told["processor"]["name"]) == ("cuda", "sm_90")
    assert 'providers=["CUDAExecutionProvider", "CPUExecutionProvider"]' in told["readme"][-1]
    assert {"kernels.so", "kernels.cu", "model.onnx"} == told["files"].keys()
    assert native.load(tmp_path / "compiled").target == "cuda"


@needs_nvrtc
def test_a_session_needs_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    compiled = native.compile(_chain(), target="cuda", processor="sm_90", cache_dir=str(tmp_path))
    with pytest.raises(MissingDependency, match=r"CUDAExecutionProvider.*\n.*sardonyx\[gpu\]"):
        compiled.session()


# Without a compiler


def test_without_nvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["/nowhere/libnvrtc.so"]))
    nvrtc.find.cache_clear()
    with pytest.raises(MissingDependency, match=r"(?s)NVRTC was not found.*torch for CUDA.*nvidia-cuda-nvrtc"):
        native.compile(_chain(), target="cuda")
    nvrtc.find.cache_clear()


def test_source_and_graph_can_be_had_by_themselves() -> None:
    made, converted = native.generate(_chain(), target="cuda"), native.convert_graph(_chain(), target="cuda")
    assert "__global__" in made.source
    assert [node.domain for node in converted.graph] == [made.domain]
    assert made.domain != native.generate(_chain()).domain


def test_products_are_left_to_onnxruntime() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("Tanh", ["y"], ["z"], name="tanh"),
        helper.make_node("Sigmoid", ["z"], ["s"], name="sigmoid"),
    ]
    model = model_of(nodes, {"x": (HALF, [8, 16]), "w": (HALF, [16, 4])}, ["s"])
    made = native.generate(model, target="cuda", select="all")
    assert [kernel.operators for kernel in made.report.kernels] == [["Tanh", "Sigmoid"]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target": "tpu"}, "target is 'tpu'"),
        ({"target": "cuda", "processor": "x86-64-v3"}, "processor is 'x86-64-v3'"),
        ({"target": "cuda", "processor": "sm_90", "measure": True}, "measure supports CPU kernels only"),
    ],
)
def test_what_is_not_possible_is_refused(
    options: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "find", lambda: nvrtc.Nvrtc("libnvrtc.so", "NVRTC 13.0"))
    with pytest.raises(OptionError, match=said):
        native.compile(_chain(), **options)


def test_a_library_for_newer_gpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "gpu_architecture", lambda: "sm_86")
    assert processor.gpu("sm_90").missing() == "GPUs from sm_90 on, and this GPU is sm_86"
    assert processor.gpu("sm_80").missing() is None
