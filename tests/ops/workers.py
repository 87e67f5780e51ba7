"""Processes that check samples and may die: what is lost is the sample that kills two of them."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .allowance import SECONDS_BETWEEN_LOOKS, Allowance

if TYPE_CHECKING:
    from .check import Outcome

SECONDS_FOR_START = 300.0
"""Of processor time, to start and to make samples."""
SAMPLES_OF_A_PROCESS = 5000
"""After so many a process is replaced: what a compiler keeps adds up."""
SAMPLES_TOGETHER = 16
"""So many are compiled as one function."""
MOST_CRASHES = 5
"""After so many the rest of an operator is not looked at."""
READY = "ready"
"""What a process says when it can take a task."""


Serve: TypeAlias = Callable[[Connection], None]
"""The life of a process: says READY, takes a task's `words`, a first sample, and whether samples are run one by one
(after a process died), says how many samples the task has, and gives an outcome for each from the first on."""


class Work(Protocol):
    """What a process is given to do."""

    @property
    def words(self) -> tuple[Any, ...]:
        """What a process is told of it."""

    def outcome(self) -> Any:
        """One without samples, which adds others, and keeps in `crashed` what was lost."""


@dataclass(frozen=True)
class Task:
    """An operator in one dtype, and the way that its samples take."""

    operator: str
    dtype: str
    way: str = ""
    """How it is run; see `ways`."""
    executor: str | None = None
    """Of the device; its own choice where it is None."""
    count: int | None = None
    """How many samples of the database are taken; all where it is None. Those at the edges always are."""

    @property
    def words(self) -> tuple[Any, ...]:
        return self.operator, self.dtype, self.way, self.executor, self.count

    def outcome(self) -> Outcome:
        from .check import Outcome

        return Outcome(self.operator, self.dtype, way=self.way)


def _serve(pipe: Connection) -> None:
    """The life of a process: takes the words of a `Task` and the first sample; gives an outcome for each."""
    import torch

    from .check import check_samples
    from .database import operators, samples, warm_up
    from .ways import CUDA, is_fit_for_cuda, on_cuda

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us
    torch.set_num_threads(1)
    warm_up()
    pipe.send(READY)
    while True:
        name, dtype, way, executor, count, first, alone = pipe.recv()
        op = operators()[name]
        found = samples(op, getattr(torch, dtype), count)
        if way == CUDA:
            found = [on_cuda(op, sample) for sample in found if is_fit_for_cuda(op, sample)]
        numbered = list(enumerate(found))
        pipe.send(len(numbered))
        numbered = numbered[first:]
        at_once = 1 if alone else SAMPLES_TOGETHER
        for some in (numbered[i : i + at_once] for i in range(0, len(numbered), at_once)):
            started = time.perf_counter()
            outcomes = check_samples(name, dtype, op, some, way, executor)
            for outcome in outcomes:
                outcome.seconds = round((time.perf_counter() - started) / len(some), 4)
                pipe.send(outcome)


class Worker:
    """One process, the operator it is at, and a new process when it dies or a sample takes too much processor time."""

    def __init__(self, seconds: float, serve: Serve = _serve) -> None:
        self._seconds, self._serve = seconds, serve
        self._process: Any = None

    def begin(self, task: Work) -> None:
        """Take on an operator."""
        self._task, self._outcome, self._ended = task, task.outcome(), False
        self._next, self._lost = 0, -1
        self._count: int | None = None
        if self._process is None or self._served > SAMPLES_OF_A_PROCESS:
            self._start()
        else:
            self._send()

    @property
    def pipe(self) -> Connection:
        """Readable when there is something to `advance` by."""
        return self._pipe

    def advance(self) -> int:
        """Take in what the process says, or that it died or is late; how many samples that settles."""
        try:
            if not self._pipe.poll():
                excess = self._allowance.excess()
                return self._lose(excess) if excess else 0
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(5)
            return self._lose(f"the process died with exit code {self._process.exitcode}")
        if answer == READY:
            self._send()
        elif isinstance(answer, int):
            self._count = answer
            self._allow(self._seconds)
            self._ended = self._next >= answer
        else:
            self._outcome.add(answer)
            self._settle()
            return 1
        return 0

    def finished(self) -> Any:
        """The outcome of the operator, once every sample is settled."""
        return self._outcome if self._ended else None

    def _settle(self) -> None:
        self._next += 1
        self._served += 1
        self._allow(self._seconds)
        self._ended = self._next == self._count

    def _lose(self, problem: str) -> int:
        """Go on in a new process: with the sample at hand again, and after it when it is lost a second time."""
        again, self._lost = self._lost != self._next, self._next
        self.stop()
        if not again:
            self._outcome.crashed.append(f"sample {self._next}: {problem}")
            self._next += 1
            hopeless = self._count is None or len(self._outcome.crashed) >= MOST_CRASHES
            self._ended = hopeless or self._next == self._count
        if not self._ended:
            self._start()
        return int(not again)

    def _start(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._served = 0
        self._allow(SECONDS_FOR_START)

    def _send(self) -> None:
        self._allow(SECONDS_FOR_START)  # samples take time to make
        with suppress(ConnectionError):  # where the process is gone, reading from it tells
            self._pipe.send((*self._task.words, self._next, self._lost >= 0))

    def _allow(self, seconds: float) -> None:
        self._allowance = Allowance(self._process.pid, seconds)

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def sweep(tasks: Iterable[Work], seconds: float, processes: int, serve: Serve = _serve) -> Iterator[Any]:
    """Check every task in several processes: gives a number of samples as they are settled, and each outcome."""
    waiting = iter(tasks)  # lazily: there may be as many as time allows
    workers: list[Worker] = []
    busy: list[Worker] = []
    try:
        for task in itertools.islice(waiting, processes):
            workers.append(Worker(seconds, serve))
            workers[-1].begin(task)
            busy.append(workers[-1])
        while busy:
            wait([worker.pipe for worker in busy], timeout=SECONDS_BETWEEN_LOOKS)
            for worker in list(busy):
                yield worker.advance()
                outcome = worker.finished()
                if outcome is not None:
                    yield outcome
                    following = next(waiting, None)
                    if following is not None:
                        worker.begin(following)
                    else:
                        busy.remove(worker)
    finally:
        for worker in workers:
            worker.stop()
