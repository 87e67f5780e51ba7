"""`sardonyx compile`: what an engine compiles is kept, and can be taken along."""

from __future__ import annotations

from pathlib import Path

import pytest

from sardonyx import native

from .calling import BERT, assert_snapshot, run, told


def test_an_engine_that_keeps_nothing_says_so(bert: Path) -> None:
    found = told("compile", bert, "--size", "batch=2")
    assert_snapshot("compile", found)
    assert "keeps nothing on disk" in run("compile", bert).stdout


def test_what_an_engine_compiles_is_kept_and_copied(resnet: Path) -> None:
    pytest.importorskip("openvino", reason="needs the package openvino")
    found = told("compile", resnet, "--engine", "openvino", "-o", "artifact")
    assert found["bytes"] == sum(path.stat().st_size for path in Path("artifact").iterdir())
    assert Path(found["cached"]).name == found["cache_key"]
    again = told("compile", resnet, "--engine", "openvino")
    assert again["cache_key"] == found["cache_key"]


def test_native_code_is_written_to_a_folder() -> None:
    found = told("compile", BERT, "--native", "-o", "compiled")
    assert found["kernels"]
    assert len(native.load("compiled").report.kernels) == len(found["kernels"])


def test_there_is_nothing_to_save_of_a_session(bert: Path) -> None:
    done = run("compile", bert, "-o", "artifact")
    assert (done.exit_code, "has nothing to save" in done.stderr, "next: --native" in done.stderr) == (3, True, True)


def test_a_folder_that_exists_is_left_alone(bert: Path) -> None:
    Path("there").mkdir()
    done = run("compile", bert, "--native", "-o", "there")
    assert (done.exit_code, "there exists already" in done.stderr) == (3, True)
