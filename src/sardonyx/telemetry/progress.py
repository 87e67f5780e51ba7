"""A line on the terminal while something takes long: what is being done, and for how many seconds."""

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
    """While active, and after two seconds, say so; only where someone is looking at a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_print_progress, args=(what, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _print_progress(what: str, done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_DELAY):
        return
    while not done.wait(_INTERVAL):
        sys.stderr.write(f"\r\033[Ksardonyx: {what}, {time.monotonic() - started:.0f} s")
        sys.stderr.flush()
    sys.stderr.write("\r\033[K")
    sys.stderr.flush()
