"""Kernels compute with bfloat16, for which onnxruntime's CPU provider has next to nothing."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import sardonyx
from tests.native.running import Feeds, Together, model_of, session_of

BF, N = TensorProto.BFLOAT16, helper.make_node
Array = np.ndarray
_ROUNDED_TWICE = 1 + 2.0**-10
"""A number is computed in float32 and rounded from there: next to the middle of two, that may tip it over."""


def half_ulp(exact: Array) -> Array:
    """Half the distance of the bfloat16 numbers around each number: they have 8 bits."""
    return np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 8)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _normed(x: Array, axis: int = -1) -> Array:
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + 1e-5)


POINTWISE: dict[str, tuple[Sequence[onnx.NodeProto], Callable[[Array, Array], Array]]] = {
    "gate": (
        [N("Sigmoid", ["x"], ["a"]), N("Mul", ["a", "x"], ["b"]), N("Mul", ["b", "k"], ["y"])],
        lambda x, k: _sigmoid(x) * x * k,
    ),
    "exponentials": (
        [N("Neg", ["x"], ["a"]), N("Exp", ["a"], ["b"]), N("Add", ["b", "k"], ["y"])],
        lambda x, k: np.exp(-x) + k,
    ),
    "quotient": (
        [N("Abs", ["k"], ["a"]), N("Sqrt", ["a"], ["b"]), N("Div", ["x", "b"], ["y"])],
        lambda x, k: x / np.sqrt(np.abs(k)),
    ),
    "choice": (
        [N("Tanh", ["x"], ["a"]), N("Less", ["x", "k"], ["c"]), N("Where", ["c", "a", "k"], ["y"])],
        lambda x, k: np.where(x < k, np.tanh(x), k),
    ),
}
NORMS: dict[str, tuple[Sequence[onnx.NodeProto], Callable[[Array, Array], Array]]] = {
    "layer norm": (
        [N("Add", ["x", "k"], ["a"]), N("LayerNormalization", ["a", "scale", "bias"], ["y"])],
        lambda x, k: _normed(x + k) * SCALE + BIAS,
    ),
    "RMS norm": (
        [N("Add", ["x", "k"], ["a"]), N("RMSNormalization", ["a", "scale"], ["y"])],
        lambda x, k: (x + k) / np.sqrt(np.square(x + k).mean(-1, keepdims=True) + 1e-5) * SCALE,
    ),
    "softmax": (
        [N("Mul", ["x", "k"], ["a"]), N("Softmax", ["a"], ["y"])],
        lambda x, k: np.exp(x * k) / np.exp(x * k).sum(-1, keepdims=True),
    ),
}
_DRAW = np.random.default_rng(0)
SCALE, BIAS = (_DRAW.uniform(0.5, 1.5, 64).astype(ml_dtypes.bfloat16).astype(np.float64) for _ in range(2))
FEEDS: Feeds = {name: _DRAW.standard_normal((24, 64)).astype(ml_dtypes.bfloat16) for name in ("x", "k")}
EXACT = [FEEDS[name].astype(np.float64) for name in ("x", "k")]


def _model(nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    held = {"scale": SCALE.astype(ml_dtypes.bfloat16), "bias": BIAS.astype(ml_dtypes.bfloat16)}
    return model_of(nodes, {"x": (BF, ["n", 64]), "k": (BF, ["n", 64])}, ["y"], held, opset=23)


@pytest.mark.parametrize("name", [*POINTWISE, *NORMS])
def test_onnxruntime_refuses_them(name: str) -> None:
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        session_of(_model({**POINTWISE, **NORMS}[name][0]))


@pytest.fixture(scope="module", params=["auto", "all"])
def together(request: pytest.FixtureRequest) -> Together:
    made = Together(choice=request.param)
    for name, (nodes, _) in {**POINTWISE, **NORMS}.items():
        assert made.add(name, _model(nodes)) is None
    made.build()
    return made


def _computed(together: Together, name: str) -> Array:
    assert len(together.model(name).graph.node) == 1
    return together.run(name, FEEDS)[0].astype(np.float64)


@pytest.mark.parametrize("name", POINTWISE)
def test_what_is_computed_by_element_is_off_by_half_an_ulp_at_most(together: Together, name: str) -> None:
    """Inside a kernel numbers are float32: however long the chain, what it gives is rounded once."""
    wanted = POINTWISE[name][1](*EXACT)
    assert (np.abs(_computed(together, name) - wanted) <= half_ulp(wanted) * _ROUNDED_TWICE).all()


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_off_by_half_an_ulp_and_what_float32_loses(together: Together, name: str) -> None:
    """Sums are float32 too. Where terms cancel, their own rounding remains, which is relative to the largest."""
    wanted = NORMS[name][1](*EXACT)
    lost = 16 * 2.0**-24 * np.abs(wanted).max()
    assert (np.abs(_computed(together, name) - wanted) <= half_ulp(wanted) * _ROUNDED_TWICE + lost).all()


class Block(nn.Module):
    """Everything but the products of a transformer's feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.norm(x + residual)) * torch.sigmoid(x)


@pytest.mark.parametrize("door", ["export", "compile"])
def test_a_module_in_bfloat16_is_nearer_to_the_exact_numbers_than_torch_is(door: str) -> None:
    module = Block().bfloat16().eval()
    x, residual = torch.randn(24, 64).bfloat16(), torch.randn(24, 64).bfloat16()
    if door == "export":
        program = sardonyx.export(module, (x, residual), native=True)
        assert program.report.nodes == 1
        found = program(x, residual)
    else:
        found = torch.compile(module, backend="sardonyx", options={"native": True})(x, residual)
    exact = Block().double()(x.double(), residual.double())
    errors = [(result.double() - exact).abs().max().item() for result in (found, module(x, residual))]
    assert found.dtype == torch.bfloat16
    assert errors[0] <= errors[1] * 1.001


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "native" / "bfloat16.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--rows", "8"])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "NOT_IMPLEMENTED" in printed
    errors = [float(x) for x in re.findall(r"largest error: (.*) of a bfloat16's half ulp", printed)]
    assert len(errors) == 2
    assert max(errors) < 1.01
