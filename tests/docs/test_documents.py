"""The documents are true: their code runs, prints what stands below it, and their tables are the program's."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import sardonyx

ROOT = Path(__file__).resolve().parents[2]
RUN = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in path.read_text()]
WITH_OPTIONS = ("README.md", "docs/options.md")
LINKING = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, and the line its text begins at."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2], text.count("\n", 0, match.start(2))) for match in found]


def expected_output(listed: list[Block], index: int) -> str | None:
    """What stands in the text block that follows a block that prints."""
    if "print(" not in listed[index].text:
        return None
    following = listed[index + 1 : index + 2]
    assert following, f"the block at line {listed[index].line} prints, and no text block follows it"
    assert following[0].language == "text", (
        f"the block at line {listed[index].line} prints, and no text block follows it"
    )
    return following[0].text


def settled(text: str) -> str:
    """The text without what differs from run to run: times, rounding errors, folders and lines of this repository."""
    text = re.sub(r"\d+ ms", "N ms", text)
    text = re.sub(r"\d\.\d+e[-+]\d+", "N", text)
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(\.md:)\d+", r"\1N", text).strip()


@pytest.mark.parametrize("path", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_in_a_document_runs_and_prints_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed, namespace = blocks(path), {"__name__": "document"}
    for index, block in enumerate(listed):
        if block.language == "python":
            printed = execute(path, block, namespace)
            wanted = expected_output(listed, index)
            assert wanted is None or settled(printed) == settled(wanted), f"after line {block.line}"


def execute(path: Path, block: Block, namespace: dict[str, Any]) -> str:
    """Run a block as if the document were its source file, so that an error shows its line."""
    code = compile("\n" * block.line + block.text, str(path), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out, torch.enable_grad():  # as a reader's program has them
        exec(code, namespace)
    return out.getvalue()


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_the_table_of_options_is_the_programs(name: str) -> None:
    text = (ROOT / name).read_text()
    table = re.search(r"<!-- options -->\n(.*?)\n<!-- /options -->", text, re.DOTALL)
    assert table is not None
    assert table[1] == sardonyx.Options.describe(), f"put sardonyx.Options.describe() into {name}"


@pytest.mark.parametrize("name", LINKING)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)  # C++ has [&](int x) too
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [target for target in targets if not (path.parent / target).exists()] == []


WALK = """
import json, sys, types
import torch
from sardonyx.engines import registry

module = types.ModuleType("walk_through")
module.__package__ = "tests.translate"
sys.modules["walk_through"] = module
registry._OURS["plain"] = "walk_through:Plain"
for line, text in json.load(sys.stdin):
    exec(compile(chr(10) * line + text, "CONTRIBUTING.md", "exec"), module.__dict__)
for name, test in list(vars(module).items()):
    if name.startswith("test_"):
        torch._dynamo.reset()
        with torch.no_grad():
            test()
        print("passed", name)
"""
"""Runs the walk-throughs in a process of their own: what they add to the tables must not stay in this one."""


def test_the_walk_throughs_for_contributors_work() -> None:
    code = [(block.line, block.text) for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "python"]
    command = [sys.executable, "-c", WALK]
    done = subprocess.run(command, input=json.dumps(code), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wanted = {name for _, text in code for name in re.findall(r"def (test_\w+)", text)}
    assert wanted <= set(done.stdout.split())
