"""What a kernel does before it runs a page: the page becomes the source file of its code."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from typing import Any


def prepare(shell: Any, name: str, text: str, lines: Sequence[int]) -> None:
    """Run the cells that follow as if `name` were their file, each below the number of lines that are above it there.

    Errors, reports and tracebacks then show a line of the page. A cell's last expression is not shown, as in a program.
    """
    numbers: dict[int, int] = {}

    def below(code: list[str]) -> list[str]:
        return ["\n"] * lines[numbers.setdefault(shell.execution_count, len(numbers))] + code  # it may be asked twice

    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    shell.ast_node_interactivity = "none"
    shell.compile.cache = lambda *_, **__: name
    shell.input_transformers_post.append(below)
