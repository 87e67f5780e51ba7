"""The C++ compiler: how it is named, and libraries that cannot be loaded."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sardonyx import Options
from sardonyx.cache.disk import default_cache
from sardonyx.errors import MissingDependency
from sardonyx.toolchain import compiler

from .compilers import failing, writing_garbage


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    compiler.find.cache_clear()
    yield
    compiler.find.cache_clear()


def test_a_library_that_cannot_be_loaded_is_an_error_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(writing_garbage(tmp_path)))
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


def test_a_compiler_may_be_named_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "g++ '-DNAMED=4'")
    found = compiler.find()
    assert found.arguments == ("-DNAMED=4",)
    assert found.version
    library = compiler.build_library("extern const int kNamed = NAMED;", Options.of(cache_dir=str(tmp_path)))
    assert library.is_file()


def test_a_compiler_may_be_in_a_folder_with_a_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    script = failing(tmp_path / "a b")
    monkeypatch.setenv("CXX", str(script))
    assert compiler.find().command == (str(script),)


def test_an_unbalanced_quote_in_the_compilers_name_is_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ 'x")
    with pytest.raises(MissingDependency, match="no C\\+\\+ compiler"):
        compiler.find()
