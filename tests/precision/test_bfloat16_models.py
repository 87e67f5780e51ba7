"""Models that are in half precision already: in float32 between their layers, which are in bf16 if the model is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sardonyx
from sardonyx.errors import CompilerError
from sardonyx.native import linear
from sardonyx.native.linear import PRECISIONS
from sardonyx.precision import bfloat16_models
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import collecting
from tests.precision.compiling import compiled

HALVES = (torch.bfloat16, torch.float16)
needs_bf16 = pytest.mark.skipif(bool(PRECISIONS["bf16"].missing()), reason="no AVX512 for bfloat16")


class Encoder(nn.Module):
    """Embedding, attention, norms and linear layers; the embedding is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return F.linear(x + self.down(F.gelu(self.up(x))), self.embedding.weight)


def tokens(length: int = 20) -> torch.Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(0))


def operators(module: nn.Module, *args: torch.Tensor, **options: Any) -> set[str]:
    """Return the operators that run; results are about as near to float64 as torch's own, or nearer."""
    with collecting() as report:
        result = compiled(module, fallback="error", **options)(*args)
    expected = module(*args)
    exact = copy.deepcopy(module).double()(*(x.double() if x.is_floating_point() else x for x in args))
    assert result.dtype == expected.dtype
    assert relative_error(result.double(), exact) <= 1.5 * relative_error(expected.double(), exact) + 1e-9
    (region,) = (region for graph in report.graphs for region in graph.regions)
    return set(region.operators)


@needs_bf16
def test_layers_and_attention_of_bfloat16_models_are_in_bf16() -> None:
    found = operators(Encoder().to(torch.bfloat16).eval(), tokens())
    assert any(name.startswith("Linear") for name in found)
    assert any(name.startswith("Attention") for name in found - {"Attention"})
    assert not found & {"Gemm", "MatMul", "FusedMatMul"}


def test_layers_of_float16_models_are_in_float32() -> None:
    found = operators(Encoder().to(torch.float16).eval(), tokens())
    assert found & {"Gemm", "MatMul", "FusedMatMul"}


@pytest.mark.parametrize("dtype", HALVES)
def test_without_native_kernels_they_are_in_float32(dtype: torch.dtype) -> None:
    found = operators(Encoder().to(dtype).eval(), tokens(), native=False)
    assert found & {"Gemm", "MatMul", "FusedMatMul"}
    assert not any(name.startswith("Linear") for name in found)


@pytest.mark.parametrize("dtype", HALVES)
def test_sizes_may_be_symbolic(dtype: torch.dtype) -> None:
    module = Encoder().to(dtype).eval()
    call = compiled(module, dynamic=True)
    for length in (20, 33, 2):
        assert relative_error(call(tokens(length)).float(), module(tokens(length)).float()) < 0.03


@pytest.mark.parametrize("dtype", HALVES)
def test_edited_weights_are_used(dtype: torch.dtype) -> None:
    module = Encoder().to(dtype).eval()
    call = compiled(module)
    call(tokens())
    for weight in (module.norm.weight, module.up.weight, module.embedding.weight):
        weight.mul_(-2.0)
        assert relative_error(call(tokens()).float(), module(tokens()).float()) < 0.03


@pytest.mark.parametrize("dtype", HALVES)
def test_a_module_stored_on_disk_is_the_same(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    results = []
    for _ in range(2):
        module = sardonyx.compile(Encoder().to(dtype).eval(), cache_dir=str(tmp_path), native=False)
        results += [module(tokens()), module(tokens())]
    built, again, eager, stored = results  # the first call of a stored model is the module's own
    assert torch.equal(again, built)
    assert torch.equal(stored, built)
    assert not torch.equal(eager, built)
    assert "dropped" not in caplog.text


@needs_bf16
def test_layers_in_float32_stay_in_it() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(64, 64).to(torch.bfloat16), nn.Linear(64, 64)
            self.gate = nn.Linear(64, 64).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            gate = F.linear(x.softmax(-1), self.gate.weight.float(), self.gate.bias.float())
            return self.head(self.body(x.to(torch.bfloat16)).float()), gate

    module, x = Mixed().eval(), torch.randn(20, 64)
    (head, gate), (_, expected) = compiled(module)(x), module(x)
    assert relative_error(gate, expected) < 1e-6
    assert head.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_that_the_model_casts_are_rounded_and_overflow(dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.to(dtype)
        ones = torch.ones(2, 1, 2, dtype=dtype)
        return F.conv1d(y.nan_to_num(0, 9, -9)[:, None], ones, padding=1).to(torch.bfloat16), y.float() - x

    x = torch.tensor([[2.0**31, -3.4e38, 1e5 + 1, 3.402e38], [0.1, -70000.0, 1 / 3, 1e-9]])
    for found, expected in zip(compiled(program)(x), program(x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_results_that_pass_through_keep_their_dtype(dtype: torch.dtype) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.layer(x)
            return y, y, x + 1, x, self.layer.weight, y > 0, y.float(), self.layer.weight + 1

    module = Several().to(dtype).eval()
    x = torch.randn(4, 8).to(dtype)
    found, expected = compiled(module)(x), module(x)
    assert [y.dtype for y in found] == [y.dtype for y in expected]
    for y, other in zip(found, expected, strict=True):
        torch.testing.assert_close(y.float(), other.float(), rtol=2e-2, atol=2e-2)


def test_infinity_and_nan_stay() -> None:
    layer = nn.Linear(8, 8).to(torch.bfloat16).eval()
    x = torch.randn(4, 8).to(torch.bfloat16)
    x[0, 0], x[2, 1] = torch.inf, torch.nan
    found, expected = compiled(layer)(x), layer(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


@needs_bf16
def test_without_a_compiler_they_are_in_float32_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(*_: Any) -> None:
        raise CompilerError("g++ failed", "no such file")

    monkeypatch.setattr(linear, "build", build)
    bfloat16_models._warn_once.cache_clear()
    found = operators(Encoder().to(torch.bfloat16).eval(), tokens())
    assert found & {"Gemm", "MatMul", "FusedMatMul"}
    assert "g++ failed" in caplog.text


@needs_bf16
@pytest.mark.usefixtures("ranked")
def test_the_option_precision_takes_them_too() -> None:
    module = Encoder().to(torch.bfloat16).eval()
    with collecting() as report:
        result = compiled(module, precision="int8", max_drop=0.3)(tokens())
    assert result.dtype == torch.bfloat16
    assert relative_error(result.float(), module(tokens()).float()) < 0.1
    (choice,) = (region.precision for graph in report.graphs for region in graph.regions)
    assert choice is not None
    assert {layer.precision for layer in choice.layers} == {"int8", "bf16"}
