"""A process that gives no outcome; in a file of its own, so that it starts without importing torch."""

from __future__ import annotations

import signal
from multiprocessing.connection import Connection

from .workers import READY


def silent(pipe: Connection) -> None:
    """The life of such a process."""
    pipe.send(READY)
    pipe.recv()
    pipe.send(1)
    signal.pause()
