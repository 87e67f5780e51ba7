"""Output of commands: results as JSON or text on stdout, progress and warnings on stderr."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.progress import track
from rich.table import Table
from rich.text import Text

from sardonyx.telemetry.report import Report
from sardonyx.telemetry.text import duration

T = TypeVar("T")

_UNLIMITED_WIDTH = 2**14
"""Columns of output to a file or a pipe: nothing is truncated."""


def example(*lines: str) -> str:
    """Return the epilog of a command: example command lines."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def print_result(result: Any, as_json: bool, *parts: RenderableType) -> None:
    """Print a result: as JSON, or as `parts`, which are texts and tables."""
    if as_json:
        text = json.dumps(_to_json(result), indent=1, ensure_ascii=not _is_unicode(), default=str)
        click.echo(_CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))
        return
    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        for part in parts:
            console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
    output = "\n".join(line.rstrip() for line in captured.get().splitlines())
    click.echo(output if _is_unicode() else output.encode(sys.stdout.encoding, "replace"))


_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which start escape sequences, and characters that reverse the direction of text."""


def printable(text: str) -> str:
    r"""Escape control characters in untrusted text, such as names in a model.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return _CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text)


class WarningHandler(logging.Handler):
    """Prints log warnings on stderr, with control characters escaped."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log record."""
        click.echo(printable(self.format(record)), err=True)


def _is_unicode() -> bool:
    return (sys.stdout.encoding or "utf-8").lower().startswith("utf")


def _to_json(value: Any) -> Any:
    """Replace non-finite numbers, which JSON lacks, by text.

    >>> _to_json({"errors": [0.5, float("inf"), float("nan")]})
    {'errors': [0.5, 'inf', 'nan']}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return [_to_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def table(headings: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = ()) -> Table:
    """Return a plain table; the columns named in `right` are aligned to the right."""
    result = Table(box=None, pad_edge=False, show_header=any(headings))
    for heading in headings:
        result.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*map(_cell, row))
    return result


def _cell(value: object) -> Text:
    if isinstance(value, Text):
        return Text(printable(value.plain), value.style)
    return Text(printable(str(value)).replace("\n", "\\n"))


def format_counts(counts: Mapping[str, int], most: int = 10) -> str:
    """Format counts, most frequent first; only `--json` has all of them.

    >>> format_counts({"Add": 1, "MatMul": 3})
    'MatMul ×3, Add ×1'
    >>> format_counts({"Add": 2, "MatMul": 3, "Exp": 1, "Neg": 1}, most=2)
    'MatMul ×3, Add ×2 and 2 others ×2'
    """
    ordered = Counter(counts).most_common()
    rest = ordered[most:]
    shown = ", ".join(f"{name} ×{count}" for name, count in ordered[:most])
    return shown + (f" and {len(rest)} others ×{sum(count for _, count in rest)}" if rest else "")


def format_times(seconds: Mapping[str, float]) -> str:
    """Format the duration of each stage.

    >>> format_times({"capture": 1.25, "translate": 0.0312})
    'capture 1.25 s, translate 31.2 ms'
    """
    return ", ".join(f"{stage} {duration(spent)}" for stage, spent in seconds.items())


def precision_result(report: Report) -> dict[str, Any]:
    """Return the precision of each layer as plain data, if one was chosen."""
    return {} if report.precision is None else {"precision": asdict(report.precision)}


def precision_lines(report: Report) -> list[str]:
    """Return the precision of each layer as lines, if one was chosen."""
    return str(report.precision).splitlines() if report.precision is not None else []


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """While active, output of a model or a factory goes to stderr: stdout is for the command's result."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def show_status(what: str, quiet: bool = False) -> Iterator[Callable[[str], object]]:
    """While active, show a status line on the terminal; yields a function that changes it."""
    with stdout_to_stderr():
        if quiet or not sys.stderr.isatty():
            yield lambda text: None
            return
        with Console(stderr=True).status(Text(what)) as status:
            yield lambda text: status.update(Text(printable(text)))


def progress_bar(items: Sequence[T], what: str, quiet: bool = False) -> Iterator[T]:
    """Iterate over items, with a progress bar on the terminal."""
    console = Console(stderr=True)
    yield from track(items, what, console=console, transient=True, disable=quiet or not sys.stderr.isatty())
