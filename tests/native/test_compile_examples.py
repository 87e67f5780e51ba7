"""The examples of native compilation run, and their models compute what PyTorch does."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "native"


def run(name: str, *flags: str) -> None:
    sys.argv[:] = [name, *flags]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "flags", "titles"),
    [
        ("simple", ["--rows", "8"], ["Exp, eight times", "masked softmax", "residual, RMS norm and gate"]),
        ("bert", ["--layers", "1", "--width", "64", "--tokens", "8"], ["BERT"]),
        ("gpt2", ["--layers", "1", "--width", "64", "--tokens", "8"], ["GPT-2"]),
        ("llama_decode", ["--layers", "1", "--width", "128", "--past", "7"], ["Llama, one token"]),
    ],
)
def test_an_example_shows_nodes_times_and_differences(
    name: str, flags: list[str], titles: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name != "simple":
        pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [])
    run(name, *flags)
    printed = capsys.readouterr().out
    assert re.findall(r"^# (.*)$", printed, re.MULTILINE) == titles
    assert len(re.findall(r"^\d+ nodes → \d+: \d+ kernels? in the place of", printed, re.MULTILINE)) == len(titles)
    differences = re.findall(r"^largest difference from PyTorch: (.*)$", printed, re.MULTILINE)
    assert [float(x) < 1e-4 for x in differences] == [True] * len(titles)
