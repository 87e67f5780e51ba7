"""Whole architectures on CUDA, in three dtypes: `python -m tests.models.cuda --results build/cuda-models.json`.

Each is compared with eager, both against float32. Needs a GPU and onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import copy
import json
import signal
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.ops.workers import READY, sweep

DTYPES = ("float32", "float16", "bfloat16")
SECONDS = 300.0
"""Of processor time."""
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass
class Outcome:
    """What became of one architecture in one dtype."""

    architecture: str
    dtype: str
    found: dict[str, Any] = field(default_factory=dict)
    crashed: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take in what a process found."""
        self.found |= other.found

    def as_json(self) -> dict[str, Any]:
        """As the file has it."""
        found = self.found or {"verdict": "crash", "error": self.crashed}
        return {"architecture": self.architecture, "dtype": self.dtype, **found}


@dataclass(frozen=True)
class Task:
    """One architecture in one dtype."""

    architecture: str
    dtype: str

    @property
    def words(self) -> tuple[Any, ...]:
        return self.architecture, self.dtype

    def outcome(self) -> Outcome:
        return Outcome(self.architecture, self.dtype)


def _serve(pipe: Connection) -> None:
    """The life of a process, see `tests.ops.workers`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send(READY)
    while True:
        name, dtype, _first, _alone = pipe.recv()
        pipe.send(1)
        pipe.send(_check(name, dtype))


def _check(name: str, dtype: str) -> Outcome:
    """Run one architecture in one dtype; never raises."""
    try:
        return Outcome(name, dtype, _compared(name, getattr(torch, dtype)))
    except Exception as error:
        text, where = f"{type(error).__name__}: {error}"[:600], traceback.format_exc(limit=-3)[-900:]
        return Outcome(name, dtype, {"verdict": "refused", "error": text, "where": where})


@torch.no_grad()
def _compared(name: str, dtype: torch.dtype) -> dict[str, Any]:
    from sardonyx.doors.dynamo import sardonyx as backend
    from sardonyx.telemetry.report import collecting
    from tests.models.architectures import ARCHITECTURES

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    build, make_inputs = ARCHITECTURES[name]
    model = build().eval().to("cuda", dtype)
    inputs = pytree.tree_map(lambda x: _moved(x, dtype), make_inputs())
    exact = copy.deepcopy(model).float()(**pytree.tree_map(lambda x: _moved(x, torch.float32), inputs))
    eager = model(**inputs)
    torch._dynamo.reset()
    with collecting() as report:
        compiled = torch.compile(model, backend=backend, options={"fallback": "quiet"})
        for _ in range(4):
            results = compiled(**inputs)  # the third and fourth replay a CUDA graph
    ours, theirs = _error(results, exact), _error(eager, exact)
    verdict = "right" if ours <= 2 * theirs + TOLERANCE[str(dtype).removeprefix("torch.")] else "WRONG"
    recordings = [str(r.recordings) for graph in report.graphs for r in graph.regions if r.recordings is not None]
    return {
        "verdict": verdict,
        "error": ours,
        "eager": theirs,
        "in torch": sorted({str(fallback) for fallback in report.fallbacks}),
        "recordings": recordings,
    }


def _moved(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.to("cuda", dtype) if x.is_floating_point() else x.cuda()


def _error(results: Any, exact: Any) -> float:
    """The largest error of any floating-point result, relative to its largest number."""
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(exact), strict=True)
    errors = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-6))
        for a, b in pairs
        if isinstance(b, torch.Tensor) and b.is_floating_point() and b.numel()
    ]
    return max(errors, default=0.0)


def main() -> int:
    """Check all, in several processes."""
    from tests.models.architectures import ARCHITECTURES
    from tests.ops.sweep import versions

    parser = argparse.ArgumentParser(prog="python -m tests.models.cuda", description=__doc__)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--results", type=Path, default=Path("build/cuda-models.json"))
    given = parser.parse_args()
    tasks = [Task(name, dtype) for dtype in given.dtypes.split(",") for name in ARCHITECTURES]
    outcomes = []
    for settled in sweep(tasks, SECONDS, given.processes, _serve):
        if isinstance(settled, Outcome):
            outcomes.append(settled.as_json())
            if outcomes[-1]["verdict"] != "right":
                print(outcomes[-1], flush=True)
    made = {"date": datetime.now(UTC).date().isoformat(), "versions": versions(), "gpu": torch.cuda.get_device_name()}
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps({**made, "outcomes": outcomes}, indent=1) + "\n")
    verdicts = Counter((outcome["dtype"], outcome["verdict"]) for outcome in outcomes)
    print(dict(verdicts))
    return int(any(verdict != "right" for _, verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
