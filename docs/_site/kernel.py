"""What a kernel does with a page: the page becomes the source file of its code; commands run as in a terminal."""

from __future__ import annotations

import linecache
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from _site.pages import commands

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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


def run_commands(text: str) -> None:
    """Run lines of `sardonyx`, in this folder and with a cache of its own; one that fails ends the page."""
    from click.testing import CliRunner

    from sardonyx.cli._program import program

    if not Path("examples").exists():
        Path("examples").symlink_to(_EXAMPLES)
    with mock.patch.dict(os.environ, SARDONYX_CACHE_DIR=str(Path("cache").resolve())):
        for number, (words, wanted) in enumerate(commands(text)):
            done = CliRunner().invoke(program, words, prog_name="sardonyx")
            print("\n" * bool(number) + done.stdout, end="")
            if done.exit_code != wanted:
                raise RuntimeError(f"{shlex.join(words)} exits with {done.exit_code}:\n{done.output}")
