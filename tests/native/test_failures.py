"""Machines without a compiler, and compilers that fail."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sardonyx import Options
from sardonyx.cache.disk import default_cache
from sardonyx.errors import MissingDependency
from sardonyx.toolchain import compiler


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


def _failing(folder: Path) -> Path:
    script = folder / "failing-c++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo failing 1.0 && exit 0\necho no such luck >&2\nexit 3\n')
    script.chmod(0o755)
    return script


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
    monkeypatch.setenv("CXX", str(_failing(tmp_path)))
    with pytest.raises(compiler.CompilerError, match="status 3:\nno such luck"):
        _train(True)


def test_a_failing_compiler_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(_failing(tmp_path)))
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
    assert "no such luck" in caplog.text


def test_kernels_are_used_in_training() -> None:
    _train("auto")
    _train(True)


def _writing_garbage(folder: Path) -> Path:
    """A compiler that says it succeeded; what it writes is text."""
    script = folder / "garbage-c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo garbage 1.0 && exit 0\n'
        'while [ "$1" != -o ]; do shift; done\necho no library > "$2"\n'
    )
    script.chmod(0o755)
    return script


def test_a_library_that_cannot_be_loaded_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(_writing_garbage(tmp_path)))
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
        _train("auto")
    assert caplog.text.count("the built library cannot be loaded") == 1


def test_a_library_that_cannot_be_loaded_is_an_error_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(_writing_garbage(tmp_path)))
    options = Options.of(cache_dir=str(tmp_path / "cache"))
    with pytest.raises(compiler.CompilerError, match="cannot be loaded"):
        compiler.build_library("int one() { return 1; }", options)
    assert default_cache(options).entries() == []


def test_nothing_is_kept_in_a_cache_from_which_no_library_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    _mount_noexec(monkeypatch, tmp_path / "cache")
    options = Options.of(cache_dir=str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING, "sardonyx"):
        library = compiler.build_library("int two() { return 2; }", options)
    assert library.is_file()
    assert not library.is_relative_to(tmp_path / "cache")
    assert "is on a noexec mount" in caplog.text


def test_no_place_to_load_a_library_from_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _mount_noexec(monkeypatch, tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(compiler.CompilerError, match="is on a noexec mount"):
        compiler.build_library("int three() { return 3; }", Options.of(cache_dir=str(tmp_path / "cache")))


def _mount_noexec(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let a folder look as if its mount allowed no executables."""
    folder.mkdir(exist_ok=True)
    inside = compiler._is_noexec
    monkeypatch.setattr(compiler, "_is_noexec", lambda path: path.is_relative_to(folder) or inside(path))


def test_whatever_goes_wrong_in_making_kernels_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError("too deep for a test")

    monkeypatch.setattr("sardonyx.native.plan_kernels", fail)
    with caplog.at_level(logging.WARNING, "sardonyx"):
        _train("auto")
    assert "no native kernels: RecursionError: too deep for a test" in caplog.text


def test_a_compiler_may_be_named_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++ '-DNAMED=4'")
    found = compiler.find()
    assert found.arguments == ("-DNAMED=4",)
    assert found.version
    library = compiler.build_library("extern const int kNamed = NAMED;", Options.of(cache_dir=str(tmp_path)))
    assert library.is_file()


def test_a_compiler_may_be_in_a_folder_with_a_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    script = _failing(tmp_path / "a b")
    monkeypatch.setenv("CXX", str(script))
    assert compiler.find().command == (str(script),)


def test_an_unbalanced_quote_in_the_compilers_name_is_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(MissingDependency, match="no C\\+\\+ compiler"):
        compiler.find()
