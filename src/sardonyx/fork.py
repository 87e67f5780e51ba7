"""Support for fork: a child process has none of its parent's threads, so waiting for one would deadlock.

Objects that own threads register here. They are notified in the child, and create their threads again when next used.
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
    """An object that is notified in a child process."""

    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


_registered: WeakSet[Any] = WeakSet()


def register(holder: ForkAware) -> None:
    """Call `holder.forked()` in every child process, as long as the holder is alive."""
    _install()
    _registered.add(holder)


def never_free(value: object) -> None:
    """Never free an object: freeing a session in a child waits for threads that do not exist."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def raise_in_child(engine: str) -> Callable[..., NoReturn]:
    """Return a replacement for an engine's function that raises, for engines that cannot recreate their threads."""

    def call(*_: Any, **__: Any) -> NoReturn:
        raise EngineError(
            f"{engine} has no threads in this process, which was forked after the model was loaded",
            hint="load the model in the child, or start processes by multiprocessing's 'spawn'",
        )

    return call


class Lock:
    """A lock that is released in a child process, even if it was held in the parent at the fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        register(self)

    def forked(self) -> None:
        """Replace the lock: the thread that held it does not exist here."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        """Acquire the lock."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._lock.release()


@cache
def _install() -> None:
    if hasattr(os, "register_at_fork"):  # which Windows lacks, as it lacks fork
        os.register_at_fork(before=threads.end_openmp_threads, after_in_child=_notify_child)


def _notify_child() -> None:
    for holder in list(_registered):
        holder.forked()
