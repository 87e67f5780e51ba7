"""`sardonyx bisect`: what is at fault, named."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.diagnose.models import FLAGS, gelu

from .calling import run, told


@pytest.mark.usefixtures("sine_as_cosine")
def test_a_wrong_rule_is_named_with_what_to_do(waves: Path) -> None:
    done = run("bisect", f"{waves}:wave")
    assert done.exit_code == 1, done.output
    assert "rule SineAsCosine" in done.stdout
    assert 'next: optimize="default-SineAsCosine"' in done.stdout


def test_a_wrong_flag_is_named(tmp_path: Path) -> None:
    onnx.save(gelu(), str(tmp_path / "gelu.onnx"))
    session = json.dumps({"config": FLAGS})
    words = ("bisect", tmp_path / "gelu.onnx", "--option", f"session_options={session}", "--tolerance", "1e-5")
    found = told(*words, "--option", "optimize=none", exit_code=1)
    (culprit,) = found["culprits"]
    assert culprit["names"] == ["session_options.config.optimization.enable_gelu_approximation=1"]


def test_nothing_at_fault_exits_with_zero(waves: Path) -> None:
    done = run("bisect", f"{waves}:wave", "--over", "rule")
    assert done.exit_code == 0, done.output
    assert "nothing is at fault" in done.stdout
