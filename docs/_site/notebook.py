"""A page as a notebook, which myst-nb runs and turns into a page of the site."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from nbformat import NotebookNode, v4

from _site import plots
from _site.pages import Cell, cells

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
DATA = frozenset({"native-operators.md", "onnx-operators.md", "operators.md", "training-sweep.md"})
"""Pages that programs write, with far more data than code: they are shown as they are."""
_MOVED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
"""Documents of the repository that are pages of the site."""


def read(text: str) -> NotebookNode:
    """What myst-nb calls; it gives the text alone, so the page's name is found by it."""
    return notebook(text, _path_of(text))


def notebook(text: str, path: Path) -> NotebookNode:
    """A page's prose and code as cells, with one before them that prepares the kernel, and their lines in the page."""
    parts = [Cell(text, 0)] if path.name in DATA else cells(text)
    pairs = [(part.line, cell) for part in parts for cell in _cells(part, path.parent)]
    lines, made = [line for line, _ in pairs], [cell for _, cell in pairs]
    code = [part.line + _empty_lines(part.text) for part in parts if part.language]
    if code:
        made.insert(0, v4.new_code_cell(_preparing(path, code), metadata={"tags": ["remove-cell"]}))
        lines.insert(0, 0)
    spec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": spec, "source_map": lines})


def _cells(part: Cell, folder: Path) -> list[NotebookNode]:
    """A part as what myst-nb shows: commands as they are written, and then what they print."""
    if part.language == "python":
        return [v4.new_code_cell(part.text.rstrip())]
    if part.language == "sh":
        tags = {"tags": ["remove-input", "scroll-output"]}
        shown = v4.new_markdown_cell(f"```sh\n{part.text}```")
        return [shown, v4.new_code_cell(f"run_commands({part.text!r})", metadata=tags)]
    return [v4.new_markdown_cell(_prose(part, folder))]


def _empty_lines(text: str) -> int:
    """How many empty lines a text begins with; IPython drops them."""
    return len(text) - len(text.lstrip("\n"))


def _path_of(text: str) -> Path:
    """The page that has this text."""
    for path in sorted(DOCS.rglob("*.md")):
        if path.read_text() == text:
            return path
    raise LookupError(f"no page in {DOCS} begins with {text[:40]!r}")


def _preparing(path: Path, lines: list[int]) -> str:
    """Code that prepares the kernel; it differs if anything does that the page's results follow from.

    So results that are kept, which jupyter-cache finds by a page's code alone, are never those of another sardonyx.
    """
    return "\n".join(
        [
            f"# {_state()}",
            "import sys, pathlib",
            f"sys.path[:0] = [{str(DOCS)!r}, {str(ROOT)!r}]",
            "from _site.kernel import prepare, run_commands",
            "del sys.path[0]",
            f"prepare(get_ipython(), 'docs/{path.name}', pathlib.Path({str(path)!r}).read_text(), {lines})",
        ]
    )


@cache
def _state() -> str:
    """A digest of this package's files, of what prepares a kernel, and of the versions of all that is installed."""
    hashed = hashlib.sha256(repr(sorted((d.metadata["Name"], d.version) for d in distributions())).encode())
    files = [path for path in (ROOT / "src").rglob("*.*") if path.suffix in {".py", ".h", ".cpp", ".in"}]
    for path in sorted([*files, DOCS / "_site/kernel.py"]):
        hashed.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


# What the site adds to prose


def _prose(part: Cell, folder: Path) -> str:
    text = re.sub(r"^<!-- toctree (.+)\n((?:.+\n)*?)-->$", _menu, part.text, flags=re.MULTILINE)
    text = re.sub(r"^<!-- plot (\S+) -->$", lambda found: plots.figure(found[1]), text, flags=re.MULTILINE)
    text = re.sub(r"^<!-- include (\S+) -->$", _included, text, flags=re.MULTILINE)
    if folder != DOCS:  # a folder of pages links to pages above it, and to nothing outside of the documents
        return text
    return re.sub(r"(\[[^\]]*\])\(\.\./([^)#\s]+)(#[^)\s]*)?\)", _link, text)


def _menu(found: re.Match[str]) -> str:
    return f"```{{toctree}}\n:hidden:\n:caption: {found[1]}\n\n{found[2]}```"


def _included(found: re.Match[str]) -> str:
    """A document of the repository without its title, which the page has; links are those of a page."""
    text = (DOCS / found[1]).read_text().partition("\n")[2]
    return re.sub(r"\]\((?!docs/|\w+:|#)", "](../", text).replace("](docs/", "](")


def _link(found: re.Match[str]) -> str:
    """A link out of `docs/`: to the page that has the document; to the file; of a folder only its name is left."""
    label, target, anchor = found[1], found[2], found[3] or ""
    if target in _MOVED:
        return f"{label}({_MOVED[target]}{anchor})"
    return found[0] if (ROOT / target).is_file() else f"`{label[1:-1].strip('`')}`"
