"""The examples run, and show what they say."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, with gradients and logs as a fresh process has them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    ours = logging.getLogger("sardonyx")
    level = ours.level
    with torch.enable_grad():
        yield
    ours.setLevel(level)


def run(name: str, *flags: str) -> None:
    sys.argv[:] = [name, *flags]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", ["finetune_transformer", "finetune_cnn"])
def test_two_loss_curves_fall_together(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(name, "--steps", "6", "--output", "drawn/curves.svg")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    steps = [tuple(map(float, row)) for row in rows if len(row) == 4 and row[0].isdigit()]
    assert [step for step, *_ in steps] == [1, 2, 3, 4, 5, 6]
    assert all(abs(eager - ours) < 1e-5 for _, eager, ours, _ in steps)
    drawing = ElementTree.parse(tmp_path / "drawn" / "curves.svg").getroot()
    curves = {line.get("class"): line for line in drawing.iterfind("{*}polyline")}
    assert {"eager", "sardonyx"} <= curves.keys()
    assert len(drawing.findall("{*}circle")) == 6


def test_the_tiny_llama_lists_the_graphs_of_its_training_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("llama_training")
    printed = capsys.readouterr().out
    assert "11 gradients; exported models: ['dort-llama-ort_0.onnx', 'dort-llama-ort_1.onnx']" in printed
    assert ": Softmax [" in printed
    files = sorted(path.name for path in (tmp_path / "dump_llama").iterdir())
    assert files == [f"dort-llama-ort_{n}.{kind}" for n in (0, 1) for kind in ("onnx", "txt")]


def test_text_is_streamed_as_eager_generates_it(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        run("generate", "--tokens", "40")
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "Sardonyx is onyx in bands: layers of red sard and" in printed
    assert "tokens equal eager's: True" in printed
