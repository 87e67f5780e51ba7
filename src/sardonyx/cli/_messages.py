"""What a command says: JSON for programs or text for people on stdout, progress for people on stderr."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table
from rich.text import Text

from sardonyx.telemetry.text import duration

T = TypeVar("T")

_UNLIMITED_WIDTH = 2**14
"""Columns where no terminal says how many there are: nothing in a file or a pipe has to be cut."""


def example(*lines: str) -> str:
    """The epilog of a command: how it is called, a line each."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def print_result(found: Any, as_json: bool, *shown: RenderableType) -> None:
    """Print what was found: itself as JSON, or these for people, a text or a table each."""
    if as_json:
        written = json.dumps(_to_json(found), indent=1, ensure_ascii=not _is_unicode(), default=str)
        click.echo(_CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", written))
        return
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in shown:
            console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
    said = "\n".join(line.rstrip() for line in captured.get().splitlines())
    click.echo(said if _is_unicode() else said.encode(sys.stdout.encoding, "replace"))


_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal instead of being shown: escape sequences begin with them, and text is reversed."""


def printable(text: str) -> str:
    r"""Text of others, such as names in a model, with what would steer a terminal written out.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return _CONTROL_CHARACTERS.sub(lambda found: ascii(found[0])[1:-1], text)


class WarningHandler(logging.Handler):
    """Shows warnings on stderr, as Python does by itself, with what would steer a terminal written out."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        click.echo(printable(self.format(record)), err=True)


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _to_json(found: Any) -> Any:
    """The same with texts in the place of numbers that JSON has not.

    >>> _as_json_has_it({"errors": [0.5, float("inf"), float("nan")]})
    {'errors': [0.5, 'inf', 'nan']}
    """
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if isinstance(found, Mapping):
        return {key: _to_json(value) for key, value in found.items()}
    return [_to_json(value) for value in found] if isinstance(found, (list, tuple)) else found


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, show_header=any(headings))
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(held: object) -> Text:
    if isinstance(held, Text):
        return Text(printable(held.plain), held.style)
    return Text(printable(str(held)).replace("\n", "\\n"))


def format_counts(found: Mapping[str, int], most: int = 10) -> str:
    """How often there is what, the most frequent first; `--json` has what is left out.

    >>> counts({"Add": 1, "MatMul": 3})
    'MatMul ×3, Add ×1'
    >>> counts({"Add": 2, "MatMul": 3, "Exp": 1, "Neg": 1}, most=2)
    'MatMul ×3, Add ×2 and 2 others ×2'
    """
    listed = Counter(found).most_common()
    rest = listed[most:]
    shown = ", ".join(f"{name} ×{count}" for name, count in listed[:most])
    return shown + (f" and {len(rest)} others ×{sum(count for _, count in rest)}" if rest else "")


def format_times(seconds: Mapping[str, float]) -> str:
    """How long each stage took.

    >>> times({"capture": 1.25, "translate": 0.0312})
    'capture 1.25 s, translate 31.2 ms'
    """
    return ", ".join(f"{stage} {duration(taken)}" for stage, taken in seconds.items())


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """While active, what a model or a factory prints goes to stderr: stdout is for what the command tells."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def show_status(what: str, quiet: bool = False) -> Iterator[Callable[[str], object]]:
    """While active, a line on the terminal says what is being done; what it gives changes that."""
    with stdout_to_stderr():
        if quiet or not sys.stderr.isatty():
            yield lambda text: None
            return
        with Console(stderr=True).status(Text(what)) as status:
            yield lambda text: status.update(Text(printable(text)))


def progress_bar(items: Sequence[T], what: str, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar on the terminal that says how many of them are done."""
    shown = Console(stderr=True)
    yield from track(items, what, console=shown, transient=True, disable=quiet or not sys.stderr.isatty())
