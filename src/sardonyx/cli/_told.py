"""What a command says: JSON for programs or text for people on stdout, progress for people on stderr."""

from __future__ import annotations

import json
import math
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

from sardonyx.diagnose.words import duration

T = TypeVar("T")

_WIDTH_OF_A_FILE = 2**14
"""Columns where no terminal says how many there are: nothing in a file or a pipe has to be cut."""


def example(*lines: str) -> str:
    """The epilog of a command: how it is called, a line each."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def tell(found: Any, as_json: bool, *shown: RenderableType) -> None:
    """Print what was found: itself as JSON, or these for people, a text or a table each."""
    if as_json:
        click.echo(json.dumps(_as_json_has_it(found), indent=1, ensure_ascii=not _is_unicode(), default=str))
        return
    width = None if sys.stdout.isatty() else _WIDTH_OF_A_FILE
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in shown:
            console.print(part, soft_wrap=isinstance(part, str))
    said = "\n".join(line.rstrip() for line in captured.get().splitlines())
    click.echo(said if _is_unicode() else said.encode(sys.stdout.encoding, "replace"))


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _as_json_has_it(found: Any) -> Any:
    """The same with texts in the place of numbers that JSON has not.

    >>> _as_json_has_it({"errors": [0.5, float("inf"), float("nan")]})
    {'errors': [0.5, 'inf', 'nan']}
    """
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    if isinstance(found, Mapping):
        return {key: _as_json_has_it(value) for key, value in found.items()}
    return [_as_json_has_it(value) for value in found] if isinstance(found, (list, tuple)) else found


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> Table:
    """A plain table; the columns named in `right` hold numbers."""
    made = Table(box=None, pad_edge=False, show_header=any(headings))
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def counts(found: Mapping[str, int]) -> str:
    """How often there is what, the most frequent first.

    >>> counts({"Add": 1, "MatMul": 3})
    'MatMul ×3, Add ×1'
    """
    return ", ".join(f"{name} ×{count}" for name, count in Counter(found).most_common())


def times(seconds: Mapping[str, float]) -> str:
    """How long each stage took.

    >>> times({"capture": 1.25, "translate": 0.0312})
    'capture 1.25 s, translate 31.2 ms'
    """
    return ", ".join(f"{stage} {duration(taken)}" for stage, taken in seconds.items())


@contextmanager
def aside() -> Iterator[None]:
    """While active, what a model or a factory prints goes to stderr: stdout is for what the command tells."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def working(what: str, quiet: bool = False) -> Iterator[Callable[[str], object]]:
    """While active, a line on the terminal says what is being done; what it gives changes that."""
    with aside():
        if quiet or not sys.stderr.isatty():
            yield lambda text: None
            return
        with Console(stderr=True).status(what) as status:
            yield status.update


def counted(items: Sequence[T], what: str, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar on the terminal that says how many of them are done."""
    shown = Console(stderr=True)
    yield from track(items, what, console=shown, transient=True, disable=quiet or not sys.stderr.isatty())
