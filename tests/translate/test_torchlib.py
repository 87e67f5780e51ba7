"""The translator "torchlib": torchlib's translations first, where they are right, and ours for the rest."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import sardonyx
from sardonyx.doors import dynamo
from sardonyx.telemetry.report import Report, collecting
from sardonyx.translate.torchlib import VERIFIED

from .agreement import gradients


def compiled(function: Callable[..., Any], *, dynamic: bool = False) -> Callable[..., Any]:
    torch._dynamo.reset()
    options = sardonyx.Options(translator="torchlib", fallback="error")
    return torch.compile(function, backend=partial(dynamo.sardonyx, options=options), fullgraph=True, dynamic=dynamic)


def by_ours(report: Report) -> dict[str, str]:
    """The operators that our own table translated, and why."""
    return {operator: reason for graph in report.graphs for operator, reason in graph.own.items()}


def agrees(function: Callable[..., Any], *args: torch.Tensor) -> dict[str, str]:
    with collecting() as report:
        torch.testing.assert_close(compiled(function)(*args), function(*args), rtol=1e-5, atol=1e-5, equal_nan=True)
    return by_ours(report)


def same_gradients(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> dict[str, str]:
    exact = gradients(function, *(x.double() for x in args))
    with collecting() as report:
        found = gradients(compiled(function), *args)
    for got, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    return by_ours(report)


SEVERAL: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "aten::native_layer_norm": (
        lambda x: torch.native_layer_norm(x, (5,), torch.arange(5, dtype=x.dtype), torch.ones(5, dtype=x.dtype), 1e-5),
        (2, 3, 5),
    ),
    "aten::native_group_norm": (
        lambda x: torch.native_group_norm(x, torch.arange(6, dtype=x.dtype), None, 2, 6, 4, 3, 1e-5),
        (2, 6, 4),
    ),
    "aten::max_pool2d_with_indices": (
        lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
        (2, 3, 7, 6),
    ),
}
"""A function of each that returns all of its outputs, and the shape of its operand."""


def test_every_function_of_several_outputs_that_is_admitted_is_tested() -> None:
    assert SEVERAL.keys() == VERIFIED


@pytest.mark.parametrize("name", sorted(VERIFIED))
def test_a_function_of_several_outputs_is_right_in_each_and_in_its_gradient(name: str) -> None:
    function, shape = SEVERAL[name]
    x = torch.randn(shape)
    assert agrees(function, x) == {}
    own = same_gradients(lambda x: function(x)[0], x)
    assert all("backward" in operator for operator in own)


def test_batch_norm_in_training_is_ours_and_the_report_says_why() -> None:
    model, x = nn.BatchNorm1d(3), torch.randn(4, 3, 5)
    eager = copy.deepcopy(model)
    with collecting() as report, torch.enable_grad():
        torch.testing.assert_close(compiled(model)(x), eager(x))
    torch.testing.assert_close(model.running_var, eager.running_var)
    assert "torchlib's translation is wrong: it normalizes by the running statistics" in str(report)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_weighs_classes_and_ignores_an_index(reduction: str) -> None:
    target, weight = torch.tensor([1, 0, -100, 2]), torch.tensor([0.2, 1.0, 3.0])
    same_gradients(lambda x: F.cross_entropy(x, target, weight.to(x.dtype), reduction=reduction), torch.randn(4, 3))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_has_its_gradients(causal: bool) -> None:
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    same_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal), q, k, v)


def test_dtypes_are_promoted_as_torch_does() -> None:
    number, whole, flag = torch.randn(3, 4), torch.arange(12).view(3, 4), torch.randn(3, 4) > 0
    agrees(lambda x, n, b: (x + n, n / 3, x * b, n > 2.5, b.sum(), (n * b).cumsum(1), n.sin()), number, whole, flag)


def test_functions_that_torchlib_writes_as_functions_of_onnx() -> None:
    assert (
        agrees(lambda x: (F.hardtanh(x, -0.5, 0.7), torch.addcmul(x, x, x, value=0.3), F.mish(x)), torch.randn(9)) == {}
    )


def test_what_torchlib_gets_wrong_is_ours() -> None:
    own = agrees(lambda x: F.avg_pool2d(x, 3, divisor_override=2), torch.randn(1, 2, 6, 6))
    assert own == {"aten.avg_pool2d.default": "torchlib's translation is wrong: it ignores divisor_override"}
    assert agrees(lambda x: F.avg_pool2d(x, 3), torch.randn(1, 2, 6, 6)) == {}


def test_what_is_not_a_number_is_not_lost() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0], [3.0, 1.0, 2.0]])
    agrees(lambda x: (x.amax(1), x.max(1), x.argmin(1), x.sort(), x.topk(2), x.clamp(0, 1), x.max(), x.relu()), x)


def test_a_product_of_a_transposed_matrix_and_a_vector() -> None:
    matrix, vector = torch.randn(5, 7), torch.randn(5)
    agrees(lambda m, v: (torch.mv(m.t(), v), torch.matmul(v, m), F.linear(v, m.t())), matrix, vector)
    program = sardonyx.export(lambda m, v: torch.matmul(m.t(), v), (matrix, vector), translator="torchlib")
    torch.testing.assert_close(program(matrix, vector), matrix.t() @ vector)


def test_tensors_without_dimensions_or_elements() -> None:
    agrees(lambda x: (x.prod(0), torch.topk(x, 1)), torch.tensor(3.0))
    agrees(lambda x, y: torch.addmm(torch.ones(3), x, y, beta=0.2), torch.randn(2, 0), torch.randn(0, 3))


def test_symbolic_sizes_are_given_to_torchlib() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, x.shape[1] // 2, 2).expand(3, -1, -1, -1).flatten(1)[:, 1 : x.shape[0]]

    with collecting() as report:
        run = compiled(function, dynamic=True)
        for x in (torch.randn(4, 6), torch.randn(5, 8)):
            torch.testing.assert_close(run(x), function(x))
    assert len(report.graphs) == 1
    assert by_ours(report) == {}


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "encoder": (encoder, (2, 5, 16)),
    "pictures": (pictures, (2, 3, 8, 8)),
    "cells": (lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8), nn.GLU(), nn.Softplus()), (2, 4, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_compiled_and_exported(name: str) -> None:
    make, shape = MODELS[name]
    torch.backends.mha.set_fastpath_enabled(False)
    model, x = make().eval(), torch.randn(shape)
    agrees(model, x)
    program = sardonyx.export(model, (x,), translator="torchlib")
    torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_training(name: str) -> None:
    make, shape = MODELS[name]
    check_training(make(), torch.randn(shape))


def test_the_tiny_llama_in_training() -> None:
    config = hf.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=1024, intermediate_size=16, num_attention_heads=2
    )
    config._attn_implementation = "eager"
    ids, mask = torch.randint(1023, (2, 64)), torch.tril(torch.ones(2, 64))
    check_training(hf.LlamaModel(config), ids, mask, dynamic=True, tolerance=2e-6)


def check_training(model: nn.Module, *args: torch.Tensor, dynamic: bool = False, tolerance: float = 1e-5) -> None:
    """Every parameter's gradient, relative to its norm, against double precision."""
    exact = copy.deepcopy(model).double()
    with torch.enable_grad():
        for run, trained in ((compiled(model, dynamic=dynamic), model), (exact, exact)):
            given = [x.to(next(trained.parameters()).dtype) if x.is_floating_point() else x for x in args]
            results = run(*given)
            result = results if isinstance(results, torch.Tensor) else results[0]
            weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
            torch.autograd.backward((result * weights).sum())
    largest = max(p.grad.norm() for p in exact.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        expected = exact.get_parameter(name).grad
        assert parameter.grad is not None
        assert expected is not None
        error = (parameter.grad.double() - expected).norm() / max(expected.norm(), 1e-3 * largest)
        assert error < tolerance, name


def test_by_default_torchlib_is_not_even_loaded() -> None:
    program = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
torch.compile(model, backend="sardonyx", options={"fallback": "error"})(torch.ones(2, 4)).sum().backward()
print("onnxscript" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
