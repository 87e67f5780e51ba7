"""Whole architectures on CUDA, in three dtypes: `python -m tests.models.cuda --results build/cuda-models.json`.

Each is compared with eager, both against float32. Needs a GPU and onnxruntime-gpu.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import traceback
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

DTYPES = ("float32", "float16", "bfloat16")
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


def check(task: tuple[str, str]) -> dict[str, Any]:
    """Run one architecture in one dtype; never raises."""
    name, dtype = task
    try:
        return {"architecture": name, "dtype": dtype, **_compared(name, getattr(torch, dtype))}
    except Exception as error:
        where = traceback.format_exc(limit=-3)
        text = f"{type(error).__name__}: {error}"
        return {"architecture": name, "dtype": dtype, "verdict": "refused", "error": text[:600], "where": where[-900:]}


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
    tasks = [(name, dtype) for dtype in given.dtypes.split(",") for name in ARCHITECTURES]
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(given.processes, maxtasksperchild=20) as pool:
        for outcome in pool.imap_unordered(check, tasks):
            outcomes.append(outcome)
            if outcome["verdict"] != "right":
                print(outcome, flush=True)
    made = {"date": datetime.now(UTC).date().isoformat(), "versions": versions(), "gpu": torch.cuda.get_device_name()}
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps({**made, "outcomes": outcomes}, indent=1) + "\n")
    verdicts = Counter((outcome["dtype"], outcome["verdict"]) for outcome in outcomes)
    print(dict(verdicts))
    return int(any(verdict != "right" for _, verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
