"""One training step of a module of each family; `make train-sweep` takes one of every module there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

from sardonyx.errors import UnsupportedOperator
from sardonyx.native import native
from sardonyx.options import Options

from . import check as checking
from .check import Mismatch, check
from .modules import CASES, Case, Formula, batch
from .page import page
from .sweep import DYNAMIC, STATIC, Outcome, as_json, attempt, chosen

REPRESENTATIVE = (
    *("conv2d-strided-dilated-grouped", "conv-transpose2d-strided-grouped", "max-pool2d-ties", "avg-pool2d-ceil"),
    *("adaptive-max-pool2d", "batch-norm2d", "group-norm", "rms-norm", "sdpa-causal", "embedding-padding"),
    *("embedding-bag-max-padding-offsets", "cross-entropy-smoothed-weights", "multi-margin", "ctc"),
    *("interpolate-bilinear", "grid-sample-bilinear-reflection", "pad-replicate2d", "scatter-reduce-amax"),
    *("slices-written", "masked-scatter", "cummax", "amax-ties", "cdist-cubic", "log-softmax", "gelu", "dropout"),
    *("alpha-dropout", "gru-given-state"),
)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_training_step_is_that_of_double_precision(name: str, dynamic: bool) -> None:
    assert check(CASES[name], dynamic=dynamic) <= CASES[name].tolerance


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(("conv2d", False), ("conv2d", True), ("batch-norm2d", False), ("batch-norm2d", True)),
        *(("max-pool2d", True), ("layer-norm", False), ("transformer-encoder-layer", True)),
    ],
)
def test_a_training_step_by_native_kernels(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = []

    def noted(model: ir.Model, options: Options, device: str) -> Path | None:
        libraries.append(native(model, options, device))
        return libraries[-1]

    monkeypatch.setenv("SARDONYX_NATIVE", "1")
    monkeypatch.setattr("sardonyx.passes.native", noted)
    assert check(CASES[name], dynamic=dynamic) <= CASES[name].tolerance
    assert any(libraries)


def skewed(model: nn.Module, dynamic: bool) -> Callable[..., Any]:
    """What a compiler would give that is off in the fourth digit."""
    return lambda x: model(x) + 1e-4 * x


def test_a_gradient_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "compiled", skewed)
    monkeypatch.setattr(checking, "went_through_onnx", lambda report: True)
    outcome = attempt(Case("line", "lines", lambda: nn.Linear(4, 4), batch((4,))), STATIC)
    assert not outcome.passes
    assert outcome.wrong[0].startswith("static: ")


def test_a_module_that_is_not_compiled_at_all_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "compiled", lambda model, dynamic: model)
    with pytest.raises(Mismatch, match="nothing of it went through ONNX"):
        check(Case("line", "lines", lambda: nn.Linear(4, 4), batch((4,))), dynamic=False)


def test_noise_that_the_backward_draws_anew_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rand_like(x)

        @staticmethod
        def backward(ctx: Any, *grad: torch.Tensor) -> torch.Tensor:
            return grad[0] * torch.rand_like(grad[0])

    monkeypatch.setattr(checking, "compiled", lambda model, dynamic: model)
    monkeypatch.setattr(checking, "went_through_onnx", lambda report: True)
    with pytest.raises(Mismatch, match="what the forward drew"):
        check(Case("noise", "noises", lambda: Formula(Forgetful.apply), batch((4,)), random="factor"), dynamic=False)


@pytest.mark.parametrize("build", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_gradient_is_refused_by_name(build: type[nn.Module]) -> None:
    model = build(10, 4, sparse=True)
    run = torch.compile(model, backend="sardonyx", options={"fallback": "error"})
    with torch.enable_grad(), pytest.raises(UnsupportedOperator, match=r"cannot express aten\._.*: a sparse gradient"):
        run(torch.randint(0, 10, (3, 2))).sum().backward()


def test_a_part_of_the_sweep_is_chosen_by_name_by_prefix_or_by_family() -> None:
    assert [case.name for case in chosen(["cdist"])] == ["cdist"]
    assert {case.name for case in chosen(["sdpa*"])} < {case.name for case in chosen(["attention"])}


def test_the_page_tells_what_is_right_what_fails_and_what_torch_cannot_do() -> None:
    right = Outcome("relu", "activations", {STATIC: 2e-8, DYNAMIC: 3e-8})
    wrong = Outcome("elu", "activations", {STATIC: 2e-8}, wrong=["dynamic: result 0 is off by 1"])
    part = Outcome("affine-grid", "sampling", {STATIC: 2e-8}, static="torch cannot")
    text = page(as_json([right, wrong, part]))
    assert "3 modules and 0 architectures; 1 fail." in text
    assert "| `relu` | 2e-08 | 3e-08 |" in text
    assert "| `elu` | 2e-08 | **dynamic: result 0 is off by 1** |" in text
    assert "| `affine-grid` | 2e-08 | – (torch cannot) |" in text


def test_labels_after_the_first_negative_one_do_not_count() -> None:
    assert check(CASES["multi-label-margin"], dynamic=False) <= 1e-5


def test_there_are_as_many_modules_as_promised() -> None:
    assert len(CASES) >= 60
