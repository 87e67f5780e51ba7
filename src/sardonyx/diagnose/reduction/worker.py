"""The client of the process that runs candidates, which is restarted if it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

import numpy as np

from sardonyx.errors import SardonyxError
from sardonyx.options import Options

Array: TypeAlias = np.ndarray[Any, Any]

_CHILD = "sardonyx.diagnose.reduction.child"
_START_SECONDS = 120.0
"""Seconds for the process to start, which imports torch."""


@dataclass(frozen=True)
class Request:
    """A model to run, and how to judge it."""

    model: bytes
    feeds: Mapping[str, Array]
    options: Options
    against: Options | None = None
    """Options of the reference; None without one."""
    expected: Sequence[Array] | None = None
    """Results of the reference, if they are already known."""
    tolerance: float | None = None
    timed: bool = False
    """Whether to compare times."""
    wants_values: bool = False
    """Whether to return the outputs."""
    limit: float = 60.0
    """Time limit in seconds."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a candidate."""

    kind: Literal["ran", "wrong", "exception", "crash", "timeout", "incomparable"]
    """"incomparable" is a failure of the reference."""
    text: str = ""
    error: float = 0.0
    """Error of the results, or the slowdown."""
    values: Sequence[Array] = field(default=(), repr=False)


def exception_outcome(error: Exception) -> Outcome:
    """Return the outcome of an exception."""
    message = error.what if isinstance(error, SardonyxError) else f"{type(error).__name__}: {error}"
    return Outcome("exception", message)


class Worker:
    """Runs candidates one after the other, isolated from each other."""

    def __init__(self, engines: Sequence[str]) -> None:
        if not hasattr(os, "fork"):
            raise SardonyxError("candidates are isolated by fork, which this system lacks", hint="use Linux or macOS")
        self._engines = list(engines)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __call__(self, request: Request) -> Outcome:
        """Run a candidate; start the process if necessary."""
        connection = self._connection or self._start()
        try:
            connection.send(request)
            if connection.poll(request.limit + _START_SECONDS):
                outcome: Outcome = connection.recv()
                return outcome
        except (EOFError, OSError):
            pass
        except KeyboardInterrupt:
            self.close()  # else its answer would be read for the next request
            raise
        self.close()
        return Outcome("crash", "the process that runs candidates died")

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        # -P: a torch.py or json.py in the working folder is not what the child imports
        command = [sys.executable, "-P", "-m", _CHILD, str(theirs.fileno()), *self._engines]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._connection = Connection(ours.detach())
        return self._connection

    def close(self) -> None:
        """End the process and its children."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its own session: only its children are in it
            self._process.wait()
        self._process = self._connection = None
