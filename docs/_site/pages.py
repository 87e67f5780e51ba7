"""A page taken apart: its prose, the code in it that runs, and what that printed.

Pages read well as they are. A `python` block runs, after those above it, and so does an `sh` block of nothing but
commands of `sardonyx`; a `text` block right below is what was printed, and below anything else text. Comments, which a
reader does not see, say what the site adds or leaves:

- `<!-- not run: why -->` right above commands that need what a machine may not have;
- `<!-- toctree Caption`, with a page's name a line, for the menu;
- `<!-- plot name -->` for a figure;
- `<!-- include ../FILE.md -->` for a document that stands elsewhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, and how many lines are above its text."""

    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Cell:
    """A part of a page: code that runs and what the page says that it printed, or prose with all other blocks."""

    text: str
    line: int
    language: str = ""
    """Of code: `python` or `sh`."""
    output: str | None = None


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page.

    >>> blocks("See:\\n\\n```sh\\nmake\\n```\\n")
    [Block(language='sh', text='make\\n', line=3)]
    """
    return [Block(found[1], found[2], text.count("\n", 0, found.start(2))) for found in _FENCED.finditer(text)]


def cells(text: str) -> list[Cell]:
    """A page as prose and code in turn; what code printed belongs to the code, and is no prose.

    >>> prose, code = cells("Hello:\\n\\n```python\\nprint(1)\\n```\\n\\n```text\\n1\\n```\\n")
    >>> code
    Cell(text='print(1)\\n', line=3, language='python', output='1\\n')
    """
    return [cell for cell in _in_turn(text) if cell.language or cell.text.strip()]


def commands(text: str) -> Iterator[tuple[list[str], int]]:
    """Of each line of `sardonyx` the words that follow, and the code it exits with: 0, or what its comment says.

    >>> list(commands("sardonyx inspect bert.onnx\\nsardonyx bisect 'my model.onnx'  # exits with 1: found"))
    [(['inspect', 'bert.onnx'], 0), (['bisect', 'my model.onnx'], 1)]
    """
    for line in text.splitlines():
        told = re.search(r"# exits with (\d+)", line)
        yield shlex.split(line, comments=True)[1:], int(told[1]) if told else 0


def _in_turn(text: str) -> Iterator[Cell]:
    prose = 0
    found = list(_FENCED.finditer(text))
    for block, following in zip_longest(found, found[1:]):
        if not (block[1] == "python" or _is_commands(text, block)):
            continue
        printed = following if following and _is_output(text, block, following) else None
        yield Cell(text[prose : block.start()], text.count("\n", 0, prose))
        yield Cell(block[2], text.count("\n", 0, block.start(2)), block[1], printed[2] if printed else None)
        prose = (printed or block).end()
    yield Cell(text[prose:], text.count("\n", 0, prose))


def _is_output(text: str, block: re.Match[str], following: re.Match[str]) -> bool:
    return following[1] == "text" and not text[block.end() : following.start()].strip()


def _is_commands(text: str, block: re.Match[str]) -> bool:
    if block[1] != "sh" or re.search(r"<!-- not run: .*-->\s*\Z", text[: block.start()]):
        return False
    return all(line.startswith("sardonyx ") for line in block[2].splitlines())
