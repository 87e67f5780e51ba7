"""A process that is told what to do on stdin, a line at a time, and answers in JSON on stdout: both of its ends."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

_LAST_WORDS = 2000
"""Characters of what a process wrote to stderr, when it ended early."""


class WorkerFailed(Exception):
    """A worker ended, or said that it cannot go on."""


class WorkerProcess:
    """The end that tells what to do. The process ends with the block that it is used in."""

    def __init__(self, command: Sequence[str], timeout: float, environment: Mapping[str, str]) -> None:
        self._timeout = timeout
        self._messages = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in close
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            env=environment,
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process, unless that is done."""
        if not self._messages.closed:
            self._process.kill()
            self._process.communicate()
            self._messages.close()

    def ask(self, what: str) -> dict[str, Any]:
        """Tell it to do something, and wait for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for an answer; the first ones come unasked."""
        assert self._process.stdout is not None
        alarm = threading.Timer(self._timeout, self._process.kill)
        alarm.start()
        line = self._process.stdout.readline()
        alarm.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._messages.seek(0)
        said = self._messages.read()[-_LAST_WORDS:]
        return f"the process ended with {code} (the limit is {self._timeout:.0f} s)\n{said}"


class Answers:
    """The end that answers, on a stream of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @classmethod
    def on_stdout(cls) -> Answers:
        """Keep stdout for answers alone: what libraries print goes to stderr, from C++ too."""
        stream = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return cls(stream)

    def send(self, what: Mapping[str, Any]) -> None:
        """Answer a line."""
        self._stream.write(json.dumps(what) + "\n")
        self._stream.flush()
