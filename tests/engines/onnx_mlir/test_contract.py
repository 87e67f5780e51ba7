"""What the engine promises with any onnx-mlir: the stand-in, and a real one where there is one."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch

from sardonyx.engines.engine import Runner
from sardonyx.engines.onnx_mlir import OnnxMlir
from sardonyx.errors import EngineError

from .jobs import ADD, SCALE, TO_FILE, built, job_of


@pytest.fixture(scope="module")
def add(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return built(job_of(ADD, compiler_path=compiler), tmp_path_factory.mktemp("add"))


@pytest.fixture(scope="module")
def mlp(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, torch.nn.Module]:
    """Every operator of the stand-in that floats take, over a batch of any size."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4), torch.nn.Tanh())
    text = """(float[N,2,3] x) => (float[N,4] y)
    <int64[2] flat = {0, 6}, float half = {0.5}>
    {
        x2 = Reshape(x, flat)
        h = Gemm<transB=1>(x2, w1, b1)
        r = Relu(h)
        p = MatMul(r, w2)
        q = Add(p, b2)
        t = Tanh(q)
        s = Sigmoid(t)
        u = Sub(s, half)
        v = Div(u, half)
        y = Mul(v, t)
    }"""
    first, second = module[0], module[2]
    weights = {"w1": first.weight, "b1": first.bias, "w2": second.weight.t().contiguous(), "b2": second.bias}
    job = job_of(text, {name: w.detach() for name, w in weights.items()}, compiler_path=compiler, compile_options="-O3")
    return built(job, tmp_path_factory.mktemp("mlp")), module


def expected(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    t = module.double()(x.double().flatten(1))
    return (t.sigmoid() - 0.5) / 0.5 * t


def test_the_sum_of_two_tensors(add: Runner) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    torch.testing.assert_close(add([x, y])[0], x + y, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [1, 5, 0])
def test_a_network_for_batches_of_any_size(mlp: tuple[Runner, torch.nn.Module], batch: int) -> None:
    run, module = mlp
    x = torch.randn(batch, 2, 3)
    torch.testing.assert_close(run([x])[0].double(), expected(module, x), rtol=1e-5, atol=1e-6)


def test_special_numbers_pass(add: Runner) -> None:
    x = torch.tensor([[float("inf"), float("-inf"), float("nan")], [0.0, -0.0, 1e-40]])
    torch.testing.assert_close(add([x, x])[0], x + x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float", torch.float32),
        ("double", torch.float64),
        ("int64", torch.int64),
        ("int32", torch.int32),
        ("bool", torch.bool),
        ("uint8", torch.uint8),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
    ],
)
def test_types_have_onnxs_numbers(compiler: str, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    text = f"({name}[N] x) => ({name}[2,N2] y) <int64[2] halves = {{2, -1}}> {{ y = Reshape(x, halves) }}"
    x = torch.tensor([0, 1, 2, 3, 1, 0]).to(dtype)
    (y,) = built(job_of(text, compiler_path=compiler), tmp_path)([x])
    assert y.dtype == dtype
    assert torch.equal(y, x.reshape(2, 3))


def test_a_tensor_without_dimensions(compiler: str, tmp_path: Path) -> None:
    run = built(job_of("(float x) => (float y) { y = Add(x, x) }", compiler_path=compiler), tmp_path)
    assert torch.equal(run([torch.tensor(1.5)])[0], torch.tensor(3.0))


def test_several_results_in_their_order(compiler: str, tmp_path: Path) -> None:
    text = "(float[2] x, float[2] y) => (float[2] s, float[2] d, float[2] p) { s = Add(x,y) d = Sub(x,y) p = Mul(x,y) }"
    x, y = torch.randn(2), torch.randn(2)
    results = built(job_of(text, compiler_path=compiler), tmp_path)([x, y])
    torch.testing.assert_close(results, [x + y, x - y, x * y], rtol=0, atol=0)


def test_inputs_that_do_not_lie_in_order(add: Runner) -> None:
    x, y = torch.randn(3, 2).t(), torch.randn(2, 6)[:, ::2]
    torch.testing.assert_close(add([x, y])[0], x + y, rtol=0, atol=0)


def test_results_keep_their_memory_when_the_runner_is_closed(compiler: str, tmp_path: Path) -> None:
    run, x = built(job_of(ADD, compiler_path=compiler), tmp_path), torch.randn(2, 3)
    (z,) = run([x, x])
    run.close()
    del run
    gc.collect()
    z.add_(1.0)  # is the caller's own
    torch.testing.assert_close(z, x + x + 1, rtol=0, atol=1e-6)


def test_a_closed_runner_says_so(compiler: str, tmp_path: Path) -> None:
    run = built(job_of(ADD, compiler_path=compiler), tmp_path)
    run.close()
    with pytest.raises(EngineError, match="closed"):
        run([torch.zeros(2, 3)] * 2)


def test_an_input_handed_through_is_a_copy(compiler: str, tmp_path: Path) -> None:
    run = built(job_of("(float[3] x) => (float[3] y) { y = Identity(x) }", compiler_path=compiler), tmp_path)
    x = torch.randn(3)
    (y,) = run([x])
    assert torch.equal(y, x)
    assert y.data_ptr() != x.data_ptr()


def test_a_constant_result_may_be_edited(compiler: str, tmp_path: Path) -> None:
    text = "(float[2] x) => (float[2] y, float[2] c) <float[2] w = {3, 4}> { y = Add(x, w) c = Identity(w) }"
    run = built(job_of(text, compiler_path=compiler), tmp_path)
    run([torch.zeros(2)])[1].fill_(7.0)
    y, c = run([torch.zeros(2)])
    assert (y.tolist(), c.tolist()) == ([3, 4], [3, 4])


def test_into_given_tensors(add: Runner) -> None:
    x, y, z = torch.randn(2, 3), torch.randn(2, 3), torch.empty(3, 2).t()
    add.into([x, y], [z])
    torch.testing.assert_close(z, x + y, rtol=0, atol=0)


def test_many_models_live_in_one_process(compiler: str, tmp_path: Path) -> None:
    weights = [torch.full((3,), float(i)) for i in range(4)]
    runs = [built(job_of(SCALE, {"w": w}, compiler_path=compiler), tmp_path / str(i)) for i, w in enumerate(weights)]
    assert [run([torch.ones(1, 3)])[0][0, 0].item() for run in runs] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (
            (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)),
            "'y' has dtype torch.float64, expected torch.float",
        ),
        ((torch.zeros(2, 4), torch.zeros(2, 3)), r"'x' has shape \[2, 4\], expected \[2, 3\]"),
        ((torch.zeros(3), torch.zeros(2, 3)), "'x' has 1 dimensions, expected 2"),
        ((torch.zeros(2, 3, device="meta"), torch.zeros(2, 3)), "'x' is on meta"),
    ],
)
def test_inputs_that_the_model_was_not_compiled_for_are_refused(
    add: Runner, inputs: tuple[torch.Tensor, ...], reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        add(inputs)


def test_sizes_of_one_name_must_agree(compiler: str, tmp_path: Path) -> None:
    text = "(float[N] x, float[N] y) => (float[N] z) { z = Add(x, y) }"
    run = built(job_of(text, compiler_path=compiler), tmp_path)
    with pytest.raises(EngineError, match=r"'y' has shape \[4\], expected \[3\]"):
        run([torch.zeros(3), torch.zeros(4)])


def test_large_constants_are_in_a_file_that_may_go_after_loading(compiler: str, tmp_path: Path) -> None:
    w, x = torch.randn(3), torch.randn(5, 3)
    job = job_of(SCALE, {"w": w}, compiler_path=compiler, compile_options=TO_FILE)
    before = dict(os.environ)
    OnnxMlir().compile(job, tmp_path)
    assert sorted(path.name.partition(".")[2] for path in tmp_path.iterdir()) == ["constants.bin", "so"]
    run = OnnxMlir().load(job, tmp_path)
    shutil.rmtree(tmp_path)
    torch.testing.assert_close(run([x])[0], x * w, rtol=0, atol=0)
    assert os.environ == before


def test_weights_too_large_for_protobuf_are_given_beside_the_model(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[OnnxMlir.__module__], "_LARGEST_MODEL", 0)
    w, x = torch.randn(3), torch.randn(5, 3)
    run = built(job_of(SCALE, {"w": w}, compiler_path=compiler), tmp_path)
    torch.testing.assert_close(run([x])[0], x * w, rtol=0, atol=0)


def test_only_the_library_is_kept(compiler: str, tmp_path: Path) -> None:
    built(job_of(ADD, compiler_path=compiler), tmp_path)
    (library,) = tmp_path.iterdir()
    assert library.suffix == ".so"


def test_threads_share_a_runner(mlp: tuple[Runner, torch.nn.Module]) -> None:
    run, module = mlp
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.no_grad():  # a thread has a mode of its own
            for size in range(1, 20):
                x = torch.full((size, 2, 3), number + size / 20)
                if not torch.allclose(run([x])[0].double(), expected(module, x), rtol=1e-5, atol=1e-6):
                    wrong.append(number)

    expected(module, torch.zeros(1, 2, 3))  # makes it double, once
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_cuda_is_refused(compiler: str, tmp_path: Path) -> None:
    job = job_of(ADD, compiler_path=compiler)
    object.__setattr__(job, "device", torch.device("cuda", 0))
    with pytest.raises(EngineError, match="tensors are on cuda:0, but onnx-mlir runs on the CPU only"):
        OnnxMlir().compile(job, tmp_path)


def test_an_operator_that_the_compiler_lacks_is_an_error_with_its_log(compiler: str, tmp_path: Path) -> None:
    text = "(float[2,3,4,4] x, float[1] r) => (float[2,3,4,4] y) { y = GroupNormalizationOfTomorrow(x, r) }"
    with pytest.raises(EngineError, match="GroupNormalizationOfTomorrow") as caught:
        OnnxMlir().compile(job_of(text, compiler_path=compiler), tmp_path)
    assert "--EmitLib" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
