"""The option `native` at every door: torch.compile, `sardonyx.compile`, `sardonyx.export` and `sardonyx.optimize`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.native.partition import DOMAIN
from sardonyx.toolchain import compiler


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Tanh(), nn.Linear(16, 4)).eval()


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def truncated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


def kernels(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain.startswith(DOMAIN)]


def exported(module: nn.Module | None = None, **options: Any) -> sardonyx.Program:
    shapes = ({0: "batch"},)
    return sardonyx.export(module or block(), (torch.randn(3, 8),), dynamic_shapes=shapes, **options)


# Export


def test_an_exported_model_with_kernels_computes_what_the_module_does() -> None:
    program = exported(native=True)
    assert kernels(program.model)
    assert program.library is not None
    assert program.library.is_file()
    for rows in (1, 3, 70):
        x = torch.randn(rows, 8)
        same(program(x), block()(x))


@pytest.mark.parametrize("how", ["auto", False])
def test_without_being_asked_an_exported_model_has_onnx_operators_alone(how: object) -> None:
    program = exported(native=how)
    assert not kernels(program.model)
    assert program.library is None
    assert [node.op_type for node in program.model.graph] == [node.op_type for node in exported().model.graph]


def test_a_saved_model_has_its_library_beside_it(tmp_path: Path) -> None:
    program = exported(native=True)
    path = program.save(tmp_path / "model.onnx")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["model.kernels.so", "model.onnx"]
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(tmp_path / "model.kernels.so"))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    x = torch.randn(5, 8)
    same(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), block()(x))


def test_a_model_without_kernels_is_saved_without_a_library(tmp_path: Path) -> None:
    program = exported(nn.Linear(8, 4), native=True)
    assert program.library is None
    program.save(tmp_path / "model.onnx")
    assert [found.name for found in tmp_path.iterdir()] == ["model.onnx"]


def test_names_of_inputs_and_outputs_are_those_asked_for() -> None:
    program = exported(nn.Sequential(nn.GELU(), nn.Tanh()), native=True, input_names=["given"], output_names=["bent"])
    assert kernels(program.model)
    assert (program.inputs, program.outputs) == (["given"], ["bent"])


def test_the_report_counts_the_kernels() -> None:
    program = exported(nn.Sequential(nn.GELU(), nn.Tanh()), native=True)
    assert program.report.nodes == len(kernels(program.model)) == 1


def test_an_exported_model_with_kernels_is_verified() -> None:
    assert exported(native=True, verify=True).library is not None


@pytest.mark.parametrize("opset", [18, 20, 23])
def test_kernels_are_made_of_any_opset(opset: int) -> None:
    program = exported(native=True, opset=opset)
    assert program.model.graph.opset_imports[""] == opset
    assert kernels(program.model)
    x = torch.randn(3, 8)
    same(program(x), block()(x))


def test_nan_and_infinity_pass_through_kernels_as_through_torch() -> None:
    module = nn.Sequential(nn.Softmax(-1), nn.Hardtanh(), nn.ReLU())
    x = torch.randn(3, 8)
    x[0, 0], x[1, 3], x[2, 7] = math.nan, math.inf, -math.inf
    program = exported(module, native=True)
    assert kernels(program.model)
    torch.testing.assert_close(program(x), module(x), rtol=1e-5, atol=1e-6, equal_nan=True)


class Bent(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(torch.tanh(x))


def test_functions_stay_functions() -> None:
    module = nn.Sequential(nn.Linear(8, 8), Bent(), nn.Softmax(-1), nn.Tanh()).eval()
    program = exported(module, native=True, functions=[Bent])
    assert kernels(program.model)
    (function,) = program.model.functions.values()
    assert [node.op_type for node in function] == ["Tanh", "Gelu"]
    x = torch.randn(3, 8)
    same(program(x), module(x))


def test_an_engine_that_takes_no_kernels_is_an_error() -> None:
    with pytest.raises(sardonyx.OptionError, match="'reference' supports no kernels") as caught:
        exported(native=True, engine="reference")
    assert "native=False" in str(caught.value)


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "absent")
    compiler.find.cache_clear()
    try:
        with pytest.raises(sardonyx.MissingDependency, match="absent"):
            exported(native=True)
    finally:
        compiler.find.cache_clear()


# Optimize


def test_an_optimized_file_has_kernels_where_asked(tmp_path: Path) -> None:
    path = exported().save(tmp_path / "plain.onnx")
    program = sardonyx.optimize(path, native=True)
    assert kernels(program.model)
    assert program.library is not None
    assert not kernels(sardonyx.optimize(path).model)
    x = torch.randn(4, 8)
    same(program(x), block()(x))


# Compile


def _through_torch(module: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(module, backend="sardonyx", options=options)


DOORS: dict[str, Callable[..., Any]] = {"torch.compile": _through_torch, "sardonyx.compile": sardonyx.compile}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("how", [True, "auto", False])
def test_inference_has_kernels_only_where_asked(door: str, how: object, tmp_path: Path) -> None:
    run = DOORS[door](block(), native=how, cache_dir=str(tmp_path))
    x = torch.randn(6, 8)
    for _ in range(2):
        same(run(x), block()(x))
    assert bool(list(tmp_path.rglob("kernels.so"))) is (how is True)


@pytest.mark.parametrize("door", DOORS)
def test_training_has_kernels_where_they_are_large_without_being_asked(door: str, tmp_path: Path) -> None:
    ours, theirs = (nn.Sequential(nn.Tanh(), nn.Softmax(-1)).train() for _ in range(2))
    run = DOORS[door](ours, cache_dir=str(tmp_path))
    x = torch.randn(64, 512, requires_grad=True)
    with torch.enable_grad():
        grad, wanted = (torch.autograd.grad(each(x).square().sum(), x)[0] for each in (run, theirs))
    same(grad, wanted)
    assert list(tmp_path.rglob("kernels.so"))


def test_a_compiled_module_whose_weights_change_keeps_its_kernels(tmp_path: Path) -> None:
    module = block()
    run = sardonyx.compile(module, native=True, cache_dir=str(tmp_path))
    x = torch.randn(6, 8)
    for _ in range(5):
        same(run(x), module(x))
        module[1].weight.mul_(1.5)


def test_operators_that_are_widened_are_in_kernels_too() -> None:
    def gated(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return nn.functional.glu(torch.cat([x, x], -1), -1), torch.histc(x.clamp(-9, 9), 4, -2, 2)

    x = torch.randn(2, 2, 2, dtype=torch.float16)
    run = torch.compile(gated, backend="sardonyx", options={"native": True})
    torch.testing.assert_close(run(x), gated(x))


@pytest.mark.parametrize("divide", [torch.floor_divide, torch.remainder, torch.fmod, truncated])
def test_a_division_of_integers_by_zero_is_an_error_with_kernels_too(divide: Callable[..., Any]) -> None:
    numbers = torch.tensor([1, 2, -3], dtype=torch.int32)
    compiled = torch.compile(lambda x, y: divide(x + 1, y) * 2, backend="sardonyx", options={"native": True})
    same(compiled(numbers, numbers), divide(numbers + 1, numbers) * 2)
    with pytest.raises(sardonyx.errors.EngineError, match="by zero"):
        compiled(numbers, torch.zeros_like(numbers))
