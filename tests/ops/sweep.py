"""Every operator of PyTorch's own database through sardonyx, each in a process that may die.

python -m tests.ops.sweep --quick --page docs/operators.md
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

Task: TypeAlias = tuple[str, str]
"""An operator's name and a dtype's."""

VERDICTS = ("passes", "partly", "in torch", "WRONG", "crash", "no samples")
SECONDS_FOR_START = 120.0


def _serve(pipe: Connection, count: int) -> None:
    """The worker: takes tasks, gives outcomes."""
    import torch

    from .check import check, operators

    torch.set_num_threads(1)
    known = operators()
    pipe.send(None)
    while True:
        name, dtype = pipe.recv()
        pipe.send(check(name, known[name], getattr(torch, dtype), count).as_json())


class Worker:
    """A process that checks one operator at a time, and is replaced when it dies or takes too long."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds
        self._process: Any = None

    def __call__(self, task: Task) -> dict[str, Any]:
        if self._process is None:
            self._start()
        try:
            self._pipe.send(task)
            return self._answer(self._seconds)
        except TimeoutError as error:
            problem = str(error)
        except (EOFError, ConnectionError):
            problem = f"the process died with exit code {self._exit_code()}"
        self.stop()
        return _crashed(task, problem)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._count), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(SECONDS_FOR_START)

    def _answer(self, seconds: float) -> dict[str, Any]:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:.0f} seconds")
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def _exit_code(self) -> int | None:
        self._process.join(5)
        return int(self._process.exitcode) if self._process.exitcode is not None else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _crashed(task: Task, problem: str) -> dict[str, Any]:
    from .check import Outcome

    return Outcome(*task, crashed=[problem]).as_json()


def sweep(tasks: list[Task], count: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The outcome of each task, in order."""
    worker = Worker(count, seconds)
    try:
        yield from map(worker, tasks)
    finally:
        worker.stop()


def versions() -> dict[str, str]:
    """What the results were made with."""
    from importlib.metadata import version

    return {name: version(name) for name in ("sardonyx", "torch", "onnxruntime", "onnx", "onnxscript")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 samples of each operator")
    parser.add_argument("--samples", type=int, default=20, help="samples of each operator (default: 20)")
    parser.add_argument("--dtypes", default="float32", help="comma-separated (default: float32)")
    parser.add_argument("--only", nargs="*", default=(), help="operators by name, or by prefix with a trailing *")
    parser.add_argument("--own", action="store_true", help="only operators that our own table translates")
    parser.add_argument("--seconds", type=float, default=90, help="time limit of an operator (default: 90)")
    parser.add_argument("--results", type=Path, default=Path("build/operators.json"), help="where results are kept")
    parser.add_argument("--resume", action="store_true", help="keep what the results file has")
    parser.add_argument("--page", type=Path, help="write the table of results as Markdown")
    return parser.parse_args()


def _matches(name: str, only: list[str]) -> bool:
    return not only or any(name == o or (o.endswith("*") and name.startswith(o[:-1])) for o in only)


def _tasks(given: argparse.Namespace) -> list[Task]:
    from .check import in_own_table, operators

    names = [n for n, op in operators().items() if _matches(n, given.only) and (not given.own or in_own_table(op))]
    return [(name, dtype) for dtype in given.dtypes.split(",") for name in names]


def _load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["outcomes"] if path.exists() else []


def _save(path: Path, outcomes: list[dict[str, Any]], count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"date": datetime.now(UTC).date().isoformat(), "versions": versions(), "samples": count}
    path.write_text(json.dumps({**made, "outcomes": outcomes}, indent=1))


def main() -> int:
    given = _arguments()
    count = 3 if given.quick else given.samples
    outcomes = _load(given.results) if given.resume else []
    done = {(o["operator"], o["dtype"]) for o in outcomes}
    tasks = [task for task in _tasks(given) if task not in done]
    started = time.perf_counter()
    for index, outcome in enumerate(sweep(tasks, count, given.seconds), 1):
        outcomes.append(outcome)
        _show(index, len(tasks), outcome, time.perf_counter() - started)
        if index % 25 == 0:
            _save(given.results, outcomes, count)
    _save(given.results, outcomes, count)
    if given.page:
        from .page import page

        given.page.write_text(page(json.loads(given.results.read_text())))
    return _conclude(outcomes)


def _show(index: int, total: int, outcome: dict[str, Any], seconds: float) -> None:
    bad = outcome["wrong"] + outcome["crashed"]
    line = f"[{index}/{total} {seconds:.0f}s] {outcome['operator']} {outcome['dtype']}: {outcome['verdict']}"
    if bad:
        print(line, *bad, sep="\n    ", flush=True)
    elif sys.stdout.isatty():
        print(f"\r\033[K{line}", end="", flush=True)
    elif index % 50 == 0:
        print(line, flush=True)


def _conclude(outcomes: list[dict[str, Any]]) -> int:
    counts = Counter((o["dtype"], o["verdict"]) for o in outcomes)
    print()
    for dtype in dict.fromkeys(o["dtype"] for o in outcomes):
        print(f"{dtype}: " + ", ".join(f"{counts[dtype, v]} {v}" for v in VERDICTS if counts[dtype, v]))
    return int(any(verdict in ("WRONG", "crash") for _, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
