"""One engine with one model, in a process of its own: told what to do on stdin, it answers in JSON on stdout.

It says once that it is ready, with the seconds of its first call, and then answers each `round N` with the time of
N calls. Between commands it waits on stdin and uses no processor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median
from typing import Any, TextIO

import torch

from benchmarks.engines import ENGINES, Call
from benchmarks.models import build
from sardonyx.diagnose.report import collecting
from sardonyx.diagnose.verify import difference

_WARM_CALLS = 3


def main(model: str, engine: str) -> None:
    """Prepare, then serve commands until stdin ends."""
    answers = _private_stdout()
    with torch.no_grad():
        try:
            call, ready = _prepare(model, engine)
        except Exception as error:
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})
            return
        _answer(answers, ready)
        for line in sys.stdin:
            _answer(answers, _round(call, int(line.split()[1])))


def _private_stdout() -> TextIO:
    """Stdout for answers alone: what libraries print goes to stderr, from C++ too."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _prepare(model: str, engine: str) -> tuple[Call, dict[str, Any]]:
    module, args = build(model)
    expected = module(*args)
    started = time.perf_counter()
    with collecting() as report:
        call = ENGINES[engine](module, args)
        result = call()
    first = time.perf_counter() - started
    graphs = len(report.graphs) if engine == "sardonyx" else None
    if graphs == 0:
        raise RuntimeError("nothing was compiled: torch ran the model eagerly")
    seconds = _round(call, _WARM_CALLS)["seconds"]
    return call, {"first": first, "error_vs_eager": difference(result, expected), "graphs": graphs, "call": seconds}


def _round(call: Call, calls: int) -> dict[str, Any]:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return {"calls": calls, "seconds": median(times)}


if __name__ == "__main__":
    main(*sys.argv[1:])
