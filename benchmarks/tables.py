"""Tables and progress for a terminal: with rich where it is installed, in plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

try:
    from rich.console import Console
    from rich.table import Table as RichTable

    _console: Console | None = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
except ImportError:
    _console = None


@dataclass
class Table:
    """Rows under a header, in sections; the first column is text, the others are numbers.

    >>> table = Table("times", ["model", "ms"])
    >>> table.add("mlp", "1.5")
    >>> print(table.plain())
    times
    model   ms
    mlp    1.5
    """

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    ends: set[int] = field(default_factory=set)
    text_columns: int = 1

    def add(self, *cells: str) -> None:
        """One more row."""
        self.rows.append(cells)

    def end_section(self) -> None:
        """A line under the last row."""
        self.ends.add(len(self.rows) - 1)

    def show(self) -> None:
        """Print it."""
        if _console is None:
            print(self.plain())
        else:
            _console.print(self._rich())

    def plain(self) -> str:
        """Aligned text."""
        everything = [tuple(self.columns), *self.rows]
        widths = [max(len(row[i]) for row in everything) for i in range(len(self.columns))]
        lines = []
        for number, row in enumerate(everything, start=-1):
            lines.append("  ".join(self._aligned(i, cell, widths[i]) for i, cell in enumerate(row)).rstrip())
            lines += [""] if number in self.ends else []
        return "\n".join([self.title, *lines])

    def _aligned(self, column: int, cell: str, width: int) -> str:
        return cell.ljust(width) if column < self.text_columns else cell.rjust(width)

    def _rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index < self.text_columns else "right")
        for index, row in enumerate(self.rows):
            table.add_row(*row, end_section=index in self.ends)
        return table


def say(text: str = "") -> None:
    """Print a line, whole, at once."""
    if _console is None:
        print(text, flush=True)
    else:
        _console.print(text, markup=False, soft_wrap=True)


@dataclass
class Progress:
    """Tells what is going on; `step` says what comes next."""

    total: int
    done: int = 0
    _status: object = None

    def step(self, what: str) -> None:
        """The next piece of work begins."""
        self.done += 1
        text = f"[{self.done}/{self.total}] {what}"
        update = getattr(self._status, "update", None)
        if update is None:
            print(text, file=sys.stderr, flush=True)
        else:
            update(text.replace("[", "\\[", 1))


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """A progress display: one moving line on a terminal, a line for each step elsewhere."""
    if _console is None or not _console.is_terminal:
        yield Progress(total)
        return
    with _console.status("") as status:
        yield Progress(total, _status=status)


def milliseconds(seconds: float) -> str:
    """Three digits that matter, in ms.

    >>> milliseconds(0.0123456), milliseconds(1.5), milliseconds(0.0000071)
    ('12.3', '1500', '0.0071')
    """
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"
