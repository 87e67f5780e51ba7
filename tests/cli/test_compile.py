"""`sardonyx compile`: what an engine compiles is kept, and can be taken along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sardonyx import native
from sardonyx.cache.disk import DiskCache
from sardonyx.cli import compile as compiling

from .calling import BERT, assert_snapshot, run, told


def test_an_engine_that_keeps_nothing_says_so(bert: Path) -> None:
    found = told("compile", bert, "--size", "batch=2")
    assert_snapshot("compile", found)
    assert "has no artifacts on disk" in run("compile", bert).stdout


def test_what_an_engine_compiles_is_kept_and_copied(resnet: Path) -> None:
    pytest.importorskip("openvino", reason="needs the package openvino")
    found = told("compile", resnet, "--engine", "openvino", "-o", "artifact")
    assert found["bytes"] == sum(path.stat().st_size for path in Path("artifact").iterdir())
    assert Path(found["cached"]).name == found["cache_key"]
    again = told("compile", resnet, "--engine", "openvino")
    assert again["cache_key"] == found["cache_key"]


def test_what_another_process_keeps_meanwhile_is_not_copied(
    resnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino", reason="needs the package openvino")
    cache = DiskCache(tmp_path / "cache", 2**30)
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(cache.root))
    about = {"what": "artifact", "engine": "openvino", "device": "cpu"}
    used_entries = compiling._used_entries

    def meanwhile(*args: Any) -> Any:
        cache.get_or_make("ab12", lambda folder: (folder / "other.xml").write_text("other") and None, about)
        return used_entries(*args)

    monkeypatch.setattr(compiling, "_used_entries", meanwhile)
    done = run("compile", resnet, "--engine", "openvino", "-o", "artifact")
    assert (done.exit_code, "another process used the cache meanwhile" in done.stderr) == (3, True), done.output
    assert not Path("artifact").exists()


def test_without_a_cache_nothing_is_kept(resnet: Path) -> None:
    pytest.importorskip("openvino", reason="needs the package openvino")
    done = run("compile", resnet, "--engine", "openvino", "--option", "cache_bytes=0")
    assert (done.exit_code, "nothing was cached on disk: the cache is disabled" in done.stdout) == (0, True), (
        done.output
    )


def test_native_code_is_written_to_a_folder() -> None:
    found = told("compile", BERT, "--native", "-o", "compiled")
    assert found["kernels"]
    assert len(native.load("compiled").report.kernels) == len(found["kernels"])


def test_there_is_nothing_to_save_of_a_session(bert: Path) -> None:
    done = run("compile", bert, "-o", "artifact")
    assert (done.exit_code, "has no artifacts to save" in done.stderr, "next: --native" in done.stderr) == (
        3,
        True,
        True,
    )


def test_a_folder_that_exists_is_left_alone(bert: Path) -> None:
    Path("there").mkdir()
    done = run("compile", bert, "--native", "-o", "there")
    assert (done.exit_code, "there already exists" in done.stderr) == (3, True)
