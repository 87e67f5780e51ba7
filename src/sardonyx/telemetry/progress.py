"""A line on the terminal while something takes long: what is being done, and for how many seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PATIENCE = 2.0
_EVERY = 0.2


@contextmanager
def showing(what: str) -> Iterator[None]:
    """While active, and after two seconds, say so; only where someone is looking at a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    teller = threading.Thread(target=_tell, args=(what, done), daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _tell(what: str, done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_PATIENCE):
        return
    while not done.wait(_EVERY):
        sys.stderr.write(f"\r\033[Ksardonyx: {what}, {time.monotonic() - started:.0f} s")
        sys.stderr.flush()
    sys.stderr.write("\r\033[K")
    sys.stderr.flush()
