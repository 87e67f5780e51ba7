"""A progress line on the terminal during long operations."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_DELAY = 2.0
_INTERVAL = 0.2


@contextmanager
def show_progress(what: str) -> Iterator[Callable[[str], None]]:
    """While active, print what is being done and for how long, after two seconds and only on a terminal.

    Yields a function that takes how far it is.
    """
    line = _Line(what)
    if not sys.stderr.isatty():
        yield line.set_remark
        return
    done = threading.Event()
    printer = threading.Thread(target=_print_progress, args=(line, done), daemon=True)
    printer.start()
    try:
        yield line.set_remark
    finally:
        done.set()
        printer.join()


@dataclass
class _Line:
    what: str
    remark: str = ""

    def set_remark(self, remark: str) -> None:
        self.remark = remark

    def text(self, seconds: float) -> str:
        return f"sardonyx: {self.what}{self.remark and f': {self.remark}'}, {seconds:.0f} s"


def _print_progress(line: _Line, done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_DELAY):
        return
    while not done.wait(_INTERVAL):
        sys.stderr.write(f"\r\033[K{line.text(time.monotonic() - started)}")
        sys.stderr.flush()
    sys.stderr.write("\r\033[K")
    sys.stderr.flush()
