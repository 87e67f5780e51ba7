"""The documents are true: their code runs, prints what stands below it, and their tables are the program's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _site.pages import Cell, blocks, cells

import sardonyx
from sardonyx import pipeline
from tests.docs.running import printed

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted(DOCS.rglob("*.md"))]
WALK_THROUGH = ROOT / "docs" / "extending.md"
RUN = [path for path in DOCUMENTS if "```python" in path.read_text() and path != WALK_THROUGH]
README_WORDS = 1400


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def settled(text: str) -> str:
    """The text without what differs from run to run: times, rounding errors, folders and lines of this repository."""
    text = re.sub(r"\d+ ms", "N ms", text)
    text = re.sub(r"\d\.\d+e[-+]\d+", "N", text)
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(\.md:)\d+", r"\1N", text).strip()


def printed_elsewhere(path: Path, code: list[Cell], folder: Path) -> list[str]:
    """What blocks print in a process of their own."""
    command = [sys.executable, "-m", "tests.docs.running", str(path), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SARDONYX_EAGER": "python"}  # which needs no build
    given = json.dumps([(cell.text, cell.line) for cell in code])
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.parametrize("path", RUN, ids=named)
def test_code_in_a_document_runs_and_prints_what_it_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = [cell for cell in cells(path.read_text()) if cell.language == "python"]
    if any("eager.enable(" in cell.text for cell in code):  # a device that is registered stays
        found = printed_elsewhere(path, code, tmp_path)
    else:
        found = printed(path, [(cell.text, cell.line) for cell in code])
    for cell, text in zip(code, found, strict=True):
        wanted = cell.output or ""
        if "print(" in cell.text or wanted:
            assert settled(text) == settled(wanted), f"after line {cell.line}"


def test_the_table_of_options_is_the_programs() -> None:
    text = (DOCS / "options.md").read_text()
    table = re.search(r"<!-- options -->\n(.*?)\n<!-- /options -->", text, re.DOTALL)
    assert table is not None
    assert table[1] == sardonyx.Options.describe(), "put sardonyx.Options.describe() into docs/options.md"


def test_the_readme_is_short_and_links_to_the_page_of_every_door() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < README_WORDS
    doors = ("torch-compile", "training", "module", "export", "eager", "native", "custom-operators", "options", "index")
    assert [name for name in doors if f"](docs/{name}.md)" not in text] == []
    assert {"docs/images/architecture.svg", "docs/images/speed.svg"} <= set(re.findall(r"!\[.*?\]\((.+?)\)", text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)  # C++ has [&](int x) too
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", prose)
    assert [target for target in targets if not (path.parent / target).exists()] == []


def in_menus(index: Path) -> list[Path]:
    """The pages that the menus at the end of an index name."""
    menus = re.findall(r"^<!-- toctree .+\n((?:.+\n)*?)-->$", index.read_text(), re.MULTILINE)
    return [index.parent / f"{name}.md" for name in "".join(menus).split()]


def test_every_page_has_one_title_and_is_in_one_menu_of_the_site() -> None:
    pages = [path for path in DOCUMENTS if path.is_relative_to(DOCS)]
    menus = [entry for path in pages if path.name == "index.md" for entry in in_menus(path)]
    assert sorted(menus) == sorted(path for path in pages if path != DOCS / "index.md")
    for path in pages:
        prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1, path.name


def test_every_decision_is_in_the_index_and_says_what_follows_from_it() -> None:
    index = (DOCS / "decisions" / "index.md").read_text()
    pages = [path for path in sorted((DOCS / "decisions").glob("*.md")) if path.name != "index.md"]
    listed = re.findall(r"^- \[(.+)\]\((.+)\)$", index, re.MULTILINE)
    assert listed == [(path.read_text().splitlines()[0].removeprefix("# "), path.name) for path in pages]
    for path in pages:
        text = path.read_text()
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], path.name
        assert len(text.splitlines()) <= 40, path.name


def test_the_architecture_page_and_its_pictures_name_files_that_exist() -> None:
    pages = [DOCS / "architecture.md", *sorted((DOCS / "images").glob("*.svg"))]
    mentioned = {name for page in pages for name in re.findall(r"[\w/]+\.py\b", page.read_text())}
    package = ROOT / "src" / "sardonyx"
    assert [name for name in mentioned if not (package / name).is_file() and not (ROOT / name).is_file()] == []
    assert {"pipeline.py", "run/region.py"} <= mentioned


def test_the_architecture_page_lists_the_passes_with_their_functions() -> None:
    text = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `(\w+)` \| (.+?) \| (.+?) \| .+ \|$", text, re.MULTILINE)
    for column, passes in ((2, pipeline.SESSION_PASSES), (3, pipeline.FILE_PASSES)):
        listed = [(row[0], row[1]) for row in rows if row[column] not in ("no", "when loaded")]
        assert listed == [(each.name, each.run.__name__) for each in passes]


WALK = """
import json, sys, types
import torch
from sardonyx.engines import registry

module = types.ModuleType("walk_through")
sys.modules["walk_through"] = module
registry._BUILTIN["plain"] = "walk_through:Plain"
for line, text in json.load(sys.stdin):
    exec(compile(chr(10) * line + text, "docs/extending.md", "exec"), module.__dict__)
for name, test in list(vars(module).items()):
    if name.startswith("test_"):
        torch._dynamo.reset()
        with torch.no_grad():
            test()
        print("passed", name)
"""
"""Runs the walk-throughs in a process of their own: what they add to the tables must not stay in this one."""


def test_the_walk_throughs_for_contributors_work() -> None:
    code = [(block.line, block.text) for block in blocks(WALK_THROUGH.read_text()) if block.language == "python"]
    command = [sys.executable, "-c", WALK]
    done = subprocess.run(command, input=json.dumps(code), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    wanted = {name for _, text in code for name in re.findall(r"def (test_\w+)", text)}
    assert wanted <= set(done.stdout.split())
