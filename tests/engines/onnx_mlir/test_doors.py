"""onnx-mlir through torch.compile and export, with what its old torch package got wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.errors import EngineError


@pytest.fixture
def options(standin: str, tmp_path: Path) -> dict[str, Any]:
    return {"engine": "onnx-mlir", "compiler_path": standin, "fallback": "error", "cache_dir": str(tmp_path / "cache")}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Sigmoid()).eval()


def agrees(run: Callable[..., Any], model: Callable[..., Any], *args: torch.Tensor) -> None:
    torch.testing.assert_close(run(*args), model(*args), rtol=1e-5, atol=1e-6)


def test_a_compiled_model(options: dict[str, Any]) -> None:
    model = perceptron()
    agrees(torch.compile(model, backend="sardonyx", options=options), model, torch.randn(3, 6))


def test_a_compiled_model_for_any_batch(options: dict[str, Any]) -> None:
    model = perceptron()
    run = torch.compile(model, backend="sardonyx", dynamic=True, options=options)
    for batch in (3, 5, 2):
        agrees(run, model, torch.randn(batch, 6))


def test_an_exported_model(options: dict[str, Any]) -> None:
    model, x = perceptron(), torch.randn(3, 6)
    program = sardonyx.export(model, (x,), dynamic_shapes=({0: "batch"},), opset=21, **options)
    agrees(program, model, x)
    agrees(program, model, torch.randn(7, 6))


def test_an_exported_model_refuses_a_size_it_was_not_made_for(options: dict[str, Any]) -> None:
    program = sardonyx.export(perceptron(), (torch.randn(3, 6),), opset=21, **options)
    with pytest.raises(ValueError, match=r"shape\[0\] is 4, and the model was exported with 3"):
        program(torch.randn(4, 6))


def test_models_that_differ_in_a_constant_only(options: dict[str, Any]) -> None:
    x = torch.randn(4)
    for factor in (2.0, 3.0):
        torch._dynamo.reset()
        run = torch.compile(lambda a, factor=factor: a * factor, backend="sardonyx", options=options)
        torch.testing.assert_close(run(x), x * factor, rtol=0, atol=0)


def test_models_that_differ_in_one_weight_only(options: dict[str, Any]) -> None:
    x = torch.randn(3, 6)
    for _ in range(2):
        torch.manual_seed(1)
        model = perceptron()
        model[0].weight.data[3, 3] += 1.0 + _
        torch._dynamo.reset()
        agrees(torch.compile(model, backend="sardonyx", options=options), model, x)


def test_a_weight_edited_in_place_is_noticed(options: dict[str, Any]) -> None:
    model, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    run = torch.compile(model, backend="sardonyx", options=options)
    agrees(run, model, x)
    model.weight.mul_(2.0)
    agrees(run, model, x)


def test_inputs_that_require_gradients(options: dict[str, Any]) -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.enable_grad():
        y = torch.compile(lambda a: a * a + a, backend="sardonyx", options=options)(x)
        y.sum().backward()
    torch.testing.assert_close(y, x * x + x)
    torch.testing.assert_close(x.grad, 2 * x.detach() + 1)


def test_what_the_compiler_lacks_is_an_error_with_its_log(options: dict[str, Any]) -> None:
    run = torch.compile(lambda a: a.sin() + 1, backend="sardonyx", options=options)
    with pytest.raises(EngineError, match=r"error: failed to legalize operation 'onnx.Sin'"):
        run(torch.randn(3))


def test_results_may_be_edited_in_place(options: dict[str, Any]) -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return (a + 1).reshape(-1)

    y = torch.compile(f, backend="sardonyx", options=options)(torch.zeros(2, 3))
    y += 1
    assert torch.equal(y, torch.full((6,), 2.0))


def test_it_is_among_the_engines() -> None:
    assert "onnx-mlir" in [engine.name for engine in sardonyx.engines()]
