"""The examples of the device run, and show what they say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from sardonyx.translate import table

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "eager"


def rows(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[list[list[str]], str]:
    """What an example prints in four steps: the lines of its tables, and all of it."""
    monkeypatch.setattr(sys, "argv", [name, "--steps", "4"])
    with torch.enable_grad():
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    return [line.split() for line in printed.splitlines() if line[:6].strip().isdigit()], printed


def test_a_cnn_learns_digits_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps, printed = rows("mnist_like", monkeypatch, capsys)
    assert [row[0] for row in steps] == ["1", "2", "3", "4"]
    assert all(float(difference) < 1e-4 for *_, difference in steps)
    assert "of the digits are read right afterwards" in printed


def test_models_of_transformers_answer_and_learn_as_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    steps, printed = rows("transformers_model", monkeypatch, capsys)
    assert [row[0] for row in steps] == ["1", "2", "3", "4"] * 2
    assert all(float(difference) < 1e-4 for *_, difference in steps)
    assert all(float(last[2]) < float(first[2]) for first, last in ((steps[0], steps[3]), (steps[4], steps[7])))
    answers = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if "differ from the CPU's" in line]
    assert len(answers) == 2
    assert max(answers) < 1e-5


def test_an_operator_is_added(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed = rows("add_an_operator", monkeypatch, capsys)
    table.remove("aten::special_spherical_bessel_j0")
    assert "special_spherical_bessel_j0.out cannot run on ort" in printed
    assert "24 calls give what the CPU does" in printed
