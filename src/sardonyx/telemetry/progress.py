"""A progress line on the terminal during long operations."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_DELAY = 2.0
_INTERVAL = 0.2


@contextmanager
def show_progress(what: str) -> Iterator[None]:
    """While active, print what is being done and for how long, after two seconds and only on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    printer = threading.Thread(target=_print_progress, args=(what, done), daemon=True)
    printer.start()
    try:
        yield
    finally:
        done.set()
        printer.join()


def _print_progress(what: str, done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_DELAY):
        return
    while not done.wait(_INTERVAL):
        sys.stderr.write(f"\r\033[Ksardonyx: {what}, {time.monotonic() - started:.0f} s")
        sys.stderr.flush()
    sys.stderr.write("\r\033[K")
    sys.stderr.flush()
