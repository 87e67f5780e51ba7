"""The page of the command line is true: every command in it runs, and the page knows every command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .calling import ROOT, run
from .test_program import EVERY

PAGE = (ROOT / "docs" / "command-line.md").read_text()
LINES = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("sardonyx ")
]


def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    """In order, in one folder: one writes what the next one reads."""
    pytest.importorskip("transformers", reason="needs the package transformers")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in LINES:
        done = run(*shlex.split(line)[1:])
        assert done.exit_code == 0, f"{line}\n{done.output}"


def test_the_page_names_every_command() -> None:
    headings = " ".join(re.findall(r"^## (.*)$", PAGE, re.MULTILINE))
    assert {name.split()[0] for name in EVERY} <= set(re.findall(r"\w+", headings))
