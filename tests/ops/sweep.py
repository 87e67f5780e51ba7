"""Every operator of PyTorch's own database through sardonyx, in processes that may die.

python -m tests.ops.sweep --quick --page build/operators.md
python -m tests.ops.sweep --quick --device ort --results build/eager-operators.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .page import MARKS, kind_of, page, sample_counts, share

SECONDS_BETWEEN_SAVES = 10.0
INTERRUPTED = 130


def versions() -> dict[str, str]:
    """What the results were made with; onnxruntime, which several packages can provide, by the one that is imported."""
    from importlib.metadata import version

    import onnxruntime

    named = {name: version(name) for name in ("sardonyx", "torch", "onnx", "onnxscript")}
    return {**named, "onnxruntime": onnxruntime.__version__}


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def source() -> str:
    """A digest of our own code and of the sweep's: results of another state are not gone on with."""
    import sardonyx

    folders = (Path(sardonyx.__file__).parent, Path(__file__).parent)
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 samples of each operator, and those at the edges")
    parser.add_argument("--samples", type=int, help="at most so many of the database's samples (default: all)")
    parser.add_argument("--dtypes", default="float32", help="comma-separated (default: float32)")
    parser.add_argument(
        "--device",
        choices=["ort", "cuda"],
        help="on the device ort, strictly and with fallback; or compiled on CUDA (default: compiled on the CPU)",
    )
    parser.add_argument("--strict", action="store_true", help="on the device: strictly alone")
    parser.add_argument("--executor", help="of the device (default: its own choice)")
    parser.add_argument("--wrapper", action="store_true", help="through sardonyx.compile, with fallback")
    parser.add_argument("--export", action="store_true", help="export the samples at the edges of each dtype too")
    parser.add_argument("--only", nargs="*", default=(), help="operators by name, or by prefix with a trailing *")
    parser.add_argument("--own", action="store_true", help="only operators that our own table translates")
    parser.add_argument("--seconds", type=float, default=120, help="processor time of a sample (default: 120)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="how many (default: 2)")
    parser.add_argument("--results", type=Path, default=Path("build/operators.json"), help="where results are kept")
    parser.add_argument(
        "--resume", action="store_true", help="keep what the results file has of this state of the code"
    )
    parser.add_argument(
        "--earlier", type=Path, help="results of earlier states, kept until swept again; the oldest are swept first"
    )
    parser.add_argument("--minutes", type=float, help="begin no operator after so many (default: sweep all)")
    parser.add_argument("--page", type=Path, help="write the table of results as Markdown")
    parsed = parser.parse_args(given)
    if (parsed.strict or parsed.executor) and parsed.device != "ort":
        parser.error("--strict and --executor are about --device ort")
    return parsed


def _matches(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == o or (o.endswith("*") and name.startswith(o[:-1])) for o in only)


class Results:
    """A file with an operator a line, never half-written; one that was cut off is read as far as it is whole.

    Each line has the date and the state of the code it was made with.
    """

    def __init__(self, path: Path, samples: int | None, executor: str | None = None, gpu: str | None = None) -> None:
        self._path = path
        today = datetime.now(UTC).date().isoformat()
        self._stamp = {"date": today, "source": source()}
        self._made = {**self._stamp, "versions": versions(), "samples": samples, "edges": True}
        if executor is not None:
            self._made["executor"] = executor
        if gpu is not None:
            self._made["gpu"] = gpu
        self._saved = time.monotonic()
        self.outcomes: list[dict[str, Any]] = []

    def load(self) -> None:
        """Keep the outcomes of an earlier run of the same code; crashes are tried again."""
        made, found = self._read(self._path)
        self.outcomes = [o for o in found if o.get("source") == self._stamp["source"] and "crashed" not in o]
        if made.get("versions") != self._made["versions"] or not self._is_alike(made):
            self.outcomes = []
        if found and not self.outcomes:
            print(f"{self._path} is from another kind of run, or another state of the code: starting over")

    def load_earlier(self, path: Path) -> None:
        """Keep outcomes of other states of the code too, where there are none of this one."""
        made, found = self._read(path)
        if not self._is_alike(made):
            raise SystemExit(f"{path} is from another kind of run")
        done = set(map(_key, self.outcomes))
        stamp = {"date": made["date"], "source": made.get("source", "")}
        self.outcomes += [{**stamp, **outcome} for outcome in found if _key(outcome) not in done]

    def _is_alike(self, made: dict[str, Any]) -> bool:
        return all(made.get(key) == self._made.get(key) for key in ("samples", "executor"))

    @staticmethod
    def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What a file was made with, and its outcomes."""
        lines = path.read_text().splitlines() if path.exists() else []
        whole = [found for found in map(_parsed, lines) if found is not None]
        made = next((found for found in whole if "versions" in found), {})
        return made, [found for found in whole if "operator" in found]

    def is_current(self, outcome: dict[str, Any]) -> bool:
        """Whether an outcome was made with this state of the code."""
        return bool(outcome.get("source") == self._stamp["source"])

    def add(self, outcome: dict[str, Any]) -> None:
        """One operator more, in place of an earlier outcome; saved every now and then."""
        self.outcomes = [o for o in self.outcomes if _key(o) != _key(outcome)]
        self.outcomes.append({**outcome, **self._stamp})
        if time.monotonic() - self._saved > SECONDS_BETWEEN_SAVES:
            self.save()

    def save(self) -> None:
        """Write the file anew and then put it in place of the old one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        ordered = sorted(self.outcomes, key=lambda o: (o["dtype"], o["operator"], o.get("way", "")))
        lines = ",\n".join(map(json.dumps, ordered))
        new.write_text(f'{{"made":\n{json.dumps(self._made)}\n,"outcomes": [\n{lines}\n]}}\n')
        os.replace(new, self._path)
        self._saved = time.monotonic()

    def as_json(self) -> dict[str, Any]:
        """What the page is made from."""
        return {**self._made, "outcomes": self.outcomes}


def _key(outcome: dict[str, Any]) -> tuple[str, str, str]:
    return outcome["operator"], outcome["dtype"], outcome.get("way", "")


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line.removesuffix(","))
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


class Progress:
    """One moving line on a terminal; elsewhere a line every half minute."""

    def __init__(self, operators: int) -> None:
        self._total = operators
        self._done = self._settled = 0
        self._began = self._shown = time.monotonic()
        self._moving = sys.stdout.isatty()

    def samples(self, count: int) -> None:
        """So many samples more are settled."""
        self._settled += count
        if time.monotonic() - self._shown > (0.2 if self._moving else 30):
            self._show()

    def operator(self, outcome: dict[str, Any]) -> None:
        """One operator more is done; what is wrong with it is said at once."""
        self._done += 1
        for problem in outcome.get("wrong", []) + outcome.get("crashed", []):
            clear = "\r\033[K" if self._moving else ""
            print(f"{clear}{outcome['operator']} {kind_of(outcome)}: {outcome['verdict']}: {problem}", flush=True)

    def _show(self) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._began
        left = seconds / max(self._done, 1) * (self._total - self._done)
        line = f"{self._done}/{self._total} operators, {self._settled} samples, at most {_minutes(left)} left"
        print(f"\r\033[K{line}" if self._moving else line, end="" if self._moving else "\n", flush=True)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _tasks(given: argparse.Namespace, count: int | None, results: Results) -> list[Any]:
    """What is left to do, the oldest results first, then the operators that take longest, so that all end together."""
    from .database import operators
    from .workers import Task

    done = set(map(_key, filter(results.is_current, results.outcomes)))
    dates = {_key(outcome): outcome["date"] for outcome in results.outcomes if "date" in outcome}
    chosen = [name for name, op in operators().items() if _matches(name, given.only) and _is_wanted(op, given.own)]
    tasks = [
        Task(name, dtype, way, given.executor, _database_samples(way, count))
        for dtype in given.dtypes.split(",")
        for name in chosen
        for way in _ways(given)
        if (name, dtype, way) not in done
    ]
    seconds = _seconds_before()

    def order(task: Task) -> tuple[str, float]:
        return dates.get((task.operator, task.dtype, task.way), ""), -seconds.get(task.operator, 0.0)

    return sorted(tasks, key=order)


def _is_wanted(op: Any, own: bool) -> bool:
    from .database import in_own_table

    return not own or in_own_table(op)


def _seconds_before() -> dict[str, float]:
    """How long each operator took in the committed results, if there are any."""
    path = Path(__file__).parents[2] / "docs" / "operators.json"
    outcomes = json.loads(path.read_text())["outcomes"] if path.exists() else []
    return {o["operator"]: o.get("seconds", 0.0) for o in outcomes}


def _database_samples(way: str, count: int | None) -> int | None:
    """At most how many of the database's samples are run this way: exports are of those at the edges alone."""
    from .ways import EXPORTED

    return 0 if way == EXPORTED else count


def _ways(given: argparse.Namespace) -> tuple[str, ...]:
    from .ways import COMPILED, CUDA, EXPORTED, FALLBACK, STRICT, WRAPPED

    if given.wrapper or given.device == "cuda":
        return (WRAPPED,) if given.wrapper else (CUDA,)
    if not given.device:
        return (COMPILED, EXPORTED) if given.export else (COMPILED,)
    return (STRICT,) if given.strict else (STRICT, FALLBACK)


def main(arguments: Sequence[str] | None = None) -> int:
    given = _arguments(arguments)
    count = 3 if given.quick else given.samples
    results = Results(given.results, count, given.executor, _gpu() if given.device == "cuda" else None)
    if given.resume:
        results.load()
    if given.earlier:
        results.load_earlier(given.earlier)
    tasks = _tasks(given, count, results)
    try:
        _run(tasks, given, results)
    except KeyboardInterrupt:
        print(f"\ninterrupted; {given.results} has what is done, and --resume goes on from there")
        return INTERRUPTED
    finally:
        results.save()
    if given.page:
        given.page.write_text(page(results.as_json()))
    return _conclude(results.outcomes)


def _run(tasks: list[Any], given: argparse.Namespace, results: Results) -> None:
    from .check import Outcome
    from .workers import sweep

    progress = Progress(len(tasks))
    for settled in sweep(_in_time(tasks, given.minutes), given.seconds, given.processes):
        if isinstance(settled, Outcome):
            if settled.has_samples:
                results.add(settled.as_json())
            progress.operator(settled.as_json())
        else:
            progress.samples(settled)


def _in_time(tasks: Sequence[Any], minutes: float | None) -> Iterator[Any]:
    """Yield tasks as long as there is time."""
    began = time.monotonic()
    for task in tasks:
        if minutes is not None and time.monotonic() - began > 60 * minutes:
            return
        yield task


def _conclude(outcomes: list[dict[str, Any]]) -> int:
    verdicts = Counter((kind_of(o), o["verdict"]) for o in outcomes)
    print()
    for kind in dict.fromkeys(map(kind_of, outcomes)):
        operators = ", ".join(f"{verdicts[kind, v]} {v}" for v in MARKS if verdicts[kind, v])
        counts = sample_counts(outcomes, kind)
        print(f"{kind}: {operators}; {counts.total()} samples, {share(counts)} right")
    return int(any(verdict in ("WRONG", "crash") for _, verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
