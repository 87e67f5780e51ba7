"""The page of the command line is true: every command in it runs, and the page knows every command."""

from __future__ import annotations

import platform
import re
import shlex
from pathlib import Path

import pytest
from _site.pages import cells, commands

from tests.cli.calling import EVERY, ROOT, run

PAGE = (ROOT / "docs" / "command-line.md").read_text()
LINES = [line for cell in cells(PAGE) if cell.language == "sh" for line in commands(cell.text)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="what the page finds is what onnxruntime does there")
def test_every_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder: one writes what the next one reads."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for words, wanted in LINES:
        done = run(*words, *(["--seconds", "0.001"] if words[0] == "bench" else []))  # times are told, not looked at
        assert done.exit_code == wanted, f"{shlex.join(words)}\n{done.output}"


_WITHOUT_MODEL = {"cache", "completion", "doctor", "engines", "op"}


@pytest.mark.parametrize("model", ["bert", "resnet50"])
def test_the_page_shows_every_command_with_both_models(model: str) -> None:
    shown = {words[0] for words, _ in LINES if any(model in word for word in words)}
    assert shown == {name.split()[0] for name in EVERY} - _WITHOUT_MODEL


def test_the_page_names_every_command() -> None:
    headings = " ".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert {name.split()[0] for name in EVERY} <= set(re.findall(r"\w+", headings))
