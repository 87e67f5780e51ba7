"""Machines without a compiler, and compilers that fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sardonyx.errors import MissingDependency
from sardonyx.toolchain import compiler
from tests.toolchain.compilers import failing, writing_garbage


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    compiler.find.cache_clear()
    yield
    compiler.find.cache_clear()


def _train(native: object) -> float:
    """A step of training with tensors large enough for kernels; the gradient's sum."""
    x = torch.linspace(-1, 1, 40000).requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) * torch.sigmoid(x)).sum()

    with torch.enable_grad():
        run = torch.compile(loss, backend="sardonyx", options={"native": native})
        run(x).backward()
        expected = torch.autograd.grad(loss(y := x.detach().requires_grad_()), y)[0]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
    return float(x.grad.sum())


def test_without_a_compiler_auto_runs_without_kernels_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
    assert "no C++ compiler found: CXX is '/nonexistent'" in caplog.text


def test_without_a_compiler_asking_for_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(MissingDependency, match="no C\\+\\+ compiler"):
        _train(True)


def test_what_a_failing_compiler_says_is_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(failing(tmp_path)))
    with pytest.raises(compiler.CompilerError, match="status 3:\nno such luck"):
        _train(True)


def test_a_failing_compiler_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(failing(tmp_path)))
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
    assert "no such luck" in caplog.text


def test_kernels_are_used_in_training() -> None:
    _train("auto")
    _train(True)


def test_a_library_that_cannot_be_loaded_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(writing_garbage(tmp_path)))
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
        _train("auto")
    assert caplog.text.count("the built library cannot be loaded") == 1


def test_whatever_goes_wrong_in_making_kernels_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError("too deep for a test")

    monkeypatch.setattr("sardonyx.native.plan_kernels", fail)
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
    assert "no native kernels: RecursionError: too deep for a test" in caplog.text
