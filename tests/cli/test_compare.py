"""`sardonyx compare`: where two ways of running a model part, told to people and to programs."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.diagnose.models import GELU, PLAIN, gelu

from .calling import BERT, run, told


@pytest.mark.usefixtures("sine_as_cosine")
def test_a_wrong_rule_shows_at_its_line_and_exits_with_one(waves: Path) -> None:
    done = run("compare", f"{waves}:wave")
    assert done.exit_code == 1, done.output
    assert "aten.sin.default" in done.stdout
    assert "waves.py:6" in done.stdout
    found = told("compare", f"{waves}:wave", exit_code=1)
    assert found["suspects"][0]["operator"] == "aten.sin.default"
    assert found["suspects"][0]["jumps"] is True


def test_ways_that_agree_exit_with_zero(waves: Path) -> None:
    found = told("compare", f"{waves}:wave", "--way", "torch:float64", "--way", "onnxruntime")
    assert found["differs"] is False
    assert found["suspects"] == []


def test_a_wrong_flag_shows_in_an_onnx_file(tmp_path: Path) -> None:
    onnx.save(gelu(), str(tmp_path / "gelu.onnx"))
    words = ("compare", tmp_path / "gelu.onnx", "--way", PLAIN, "--way", GELU, "--tolerance", "1e-5")
    assert told(*words, exit_code=1)["suspects"][0]["key"] == "f"


def test_what_makes_nan_is_found(waves: Path) -> None:
    found = told("compare", f"{waves}:fails", "--nan", exit_code=1)
    assert [(x["operator"], x["makes"]) for x in found["nonfinite"]] == [("aten.sqrt.default", "NaN")]
    done = run("compare", f"{waves}:wave", "--nan")
    assert done.exit_code == 0
    assert "every value is a finite number" in done.stdout


def test_modules_of_bert_are_listed() -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    done = run("compare", BERT, "--by", "module", "--way", "torch", "--way", PLAIN)
    assert done.exit_code == 0, done.output
    assert "encoder.layer.1.output.LayerNorm" in done.stdout


def test_a_way_that_is_none_is_an_error_with_the_next_step(waves: Path) -> None:
    done = run("compare", f"{waves}:wave", "--way", "torch", "--way", "torch:float8")
    assert done.exit_code == 3
    assert "next: use 'torch'" in done.output
