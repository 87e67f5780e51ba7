"""Processes that fork: the child has none of its parent's threads, and whatever waits for one would wait for ever.

What has threads registers here, and is told in the child, where it makes them again when it is next used.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, Protocol
from weakref import WeakSet

from sardonyx import threads
from sardonyx.errors import EngineError


class ForkAware(Protocol):
    """What has to know that it is in a child process."""

    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


_registered: WeakSet[Any] = WeakSet()


def register(holder: ForkAware) -> None:
    """Call `holder.forked()` in every child process, as long as the holder is alive."""
    _install()
    _registered.add(holder)


def never_free(value: object) -> None:
    """Keep an object for the rest of the process: freeing a session waits for threads that are not there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def raise_in_child(engine: str) -> Callable[..., NoReturn]:
    """What stands for a function of an engine whose threads cannot be made again in a child process."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            f"{engine} has no threads in this process, which was forked after the model was loaded",
            hint="load the model in the child, or start processes by multiprocessing's 'spawn'",
        )

    return call


class Lock:
    """A lock that is free in a child process, whoever held it in the parent."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        register(self)

    def forked(self) -> None:
        """Start over: the thread that held it is not there."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Wait for it."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Let others have it."""
        self._lock.release()


@cache
def _install() -> None:
    if hasattr(os, "register_at_fork"):  # which Windows lacks, as it lacks fork
        os.register_at_fork(before=threads.end_openmp_threads, after_in_child=_notify_child)


def _notify_child() -> None:
    for holder in list(_registered):
        holder.forked()
