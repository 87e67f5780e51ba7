"""BERT and ResNet-50, as files, through the commands whose own tests are on smaller models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .calling import run, told

pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")


@pytest.fixture(params=["bert", "resnet"])
def model(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_rewrites_keep_the_result(model: Path) -> None:
    found = told("compare", model)
    assert (found["differs"], found["suspects"]) == (False, [])


def test_no_rule_is_at_fault(model: Path) -> None:
    found = told("bisect", model, "--over", "rule")
    assert found["culprits"] == []


def test_a_model_that_is_right_is_not_reduced(model: Path) -> None:
    words = ("--fails", "wrong", "--way", "onnxruntime:optimize=none", "--against", "onnxruntime")
    done = run("reduce", model, "-o", "smaller", *words)
    assert done.exit_code == 3, done.output
    assert not Path("smaller").exists()


def test_the_time_of_a_call_is_told_by_operator(model: Path) -> None:
    found = told("profile", model, "--calls", "2", "--trace", "trace.json")
    kinds = {row["name"] for row in found["operators"]}
    assert kinds & {"Gemm", "Conv"}
    assert Path("trace.json").stat().st_size > 0


def test_a_page_is_written(model: Path) -> None:
    pytest.importorskip("jinja2", reason="needs the package jinja2")
    found = told("report", model, "-o", "page.html")
    assert Path("page.html").stat().st_size == found["bytes"]
    assert found["fallbacks"] == 0
    assert "LayerNormalization" in (page := Path("page.html").read_text()) or "Conv" in page


def test_the_outline_names_every_node(model: Path) -> None:
    found = told("view", model)
    assert len(found["node_list"]) == found["nodes"]


@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_kernels_are_compiled_and_shown(model: Path) -> None:
    made = told("native", "compile", model, "-o", "deep/compiled")
    assert told("native", "show", "deep/compiled")["kernels"] == made["kernels"]
