"""A warm process for candidates, seen from the side that asks: it is started again when it dies."""

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
"""Seconds for the process to start, which loads torch."""


@dataclass(frozen=True)
class Request:
    """A model to run, and what to find out."""

    model: bytes
    feeds: Mapping[str, Array]
    options: Options
    against: Options | None = None
    """How the results that count as right are computed; None if none are."""
    expected: Sequence[Array] | None = None
    """Results that count as right, where they are known already."""
    tolerance: float | None = None
    timed: bool = False
    """Whether it is time that is compared."""
    wants_values: bool = False
    """Whether the outputs themselves are wanted."""
    limit: float = 60.0
    """Seconds it may take."""


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate."""

    kind: Literal["ran", "wrong", "exception", "crash", "timeout", "incomparable"]
    """The last is a failure of the way that counts as right."""
    text: str = ""
    error: float = 0.0
    """How far the results are apart, or how often as long it took."""
    values: Sequence[Array] = field(default=(), repr=False)


def exception_outcome(error: Exception) -> Outcome:
    """What an exception says."""
    said = error.what if isinstance(error, SardonyxError) else f"{type(error).__name__}: {error}"
    return Outcome("exception", said)


class Worker:
    """Runs candidates one after the other, each isolated from the rest."""

    def __init__(self, engines: Sequence[str]) -> None:
        if not hasattr(os, "fork"):
            raise SardonyxError("candidates are isolated by fork, which this system has not", hint="use Linux or macOS")
        self._engines = list(engines)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def __call__(self, request: Request) -> Outcome:
        """What becomes of a candidate; a process that is gone is replaced."""
        connection = self._connection or self._start()
        try:
            connection.send(request)
            if connection.poll(request.limit + _START_SECONDS):
                outcome: Outcome = connection.recv()
                return outcome
        except (EOFError, OSError):
            pass
        except KeyboardInterrupt:
            self.close()  # its answer would be taken for that to the next request
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
        """End the process, and what it has started."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: no process of others is in it
            self._process.wait()
        self._process = self._connection = None
