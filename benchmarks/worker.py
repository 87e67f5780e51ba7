"""Some engines with one model, in a process of their own: told what to do on stdin, it answers in JSON on stdout.

It says of each engine that it is ready, with the seconds of its first call, and then answers each `round INDEX N` with
the time of N calls of that engine. Between commands it waits on stdin and uses no processor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

from benchmarks.processes import Answers
from benchmarks.turns import Prepared

_WARM_CALLS = 3


def main(suite: str, model: str, *engines: str) -> None:
    """Prepare, then serve commands until stdin ends."""
    answers = Answers.on_stdout()
    prepare: Callable[[str, str], Prepared] = import_module(f"benchmarks.{suite}").prepare
    calls = [_ready(partial(prepare, model, engine), answers) for engine in engines]
    for line in sys.stdin:
        index, times = map(int, line.split()[1:])
        answers.send(_round(calls[index], times))


def _ready(prepare: Callable[[], Prepared], answers: Answers) -> Callable[[], Any]:
    """The call of an engine that is prepared; one that cannot be is never called."""
    try:
        prepared = prepare()
        if prepared.graphs == 0:
            raise RuntimeError("nothing was compiled: torch ran the model eagerly")
    except Exception as error:
        answers.send({"error": f"{type(error).__name__}: {error}"})
        return lambda: None
    answers.send(
        {
            "first": prepared.first_call_seconds,
            "error_vs_eager": prepared.error_vs_eager,
            "graphs": prepared.graphs,
            "details": prepared.details,
            "call": _round(prepared.call, _WARM_CALLS)["seconds"],
        }
    )
    return prepared.call


def _round(call: Callable[[], Any], calls: int) -> dict[str, Any]:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return {"calls": calls, "seconds": median(times)}


if __name__ == "__main__":
    main(*sys.argv[1:])
