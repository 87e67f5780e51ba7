"""What a declared operator costs beside one written by hand for torch: `python -m benchmarks.custom_op`.

Building it with empty caches and with full ones, each in processes of their own; and calling it, in turns with the
other, in one process. Both compute the same: the sum of two tensors of one element.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import cpp_extension

import sardonyx
from benchmarks.machine import describe
from benchmarks.tables import Table

_ROUNDS = 15
_CALLS = 20_000
_STARTS = 5

_BY_HAND = r"""
#include <torch/library.h>
#include <ATen/ATen.h>
at::Tensor added(const at::Tensor& x, const at::Tensor& y, double scale) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && y.scalar_type() == at::kFloat, "it takes float32");
  TORCH_CHECK(x.sizes() == y.sizes(), "it takes tensors of one shape");
  const at::Tensor a = x.contiguous(), b = y.contiguous();
  at::Tensor result = at::empty_like(a);
  const float *p = a.const_data_ptr<float>(), *q = b.const_data_ptr<float>();
  float* r = result.mutable_data_ptr<float>();
  for (int64_t i = 0, n = a.numel(); i < n; ++i) r[i] = p[i] + q[i] * scale;
  return result;
}
TORCH_LIBRARY(byhand, m) { m.def("added(Tensor x, Tensor y, *, float scale=1.0) -> Tensor"); }
TORCH_LIBRARY_IMPL(byhand, CPU, m) { m.impl("added", added); }
"""

_KERNEL = """
template <class T>
void added(In<T> x, In<T> y, Out<T> z, double scale, Parallel) {
  for (int64_t i = 0; i < x.size(); ++i) z[i] = x[i] + y[i] * scale;
}
"""


def _shape(x: Any, y: Any) -> Any:
    if x != y:
        raise ValueError("it takes tensors of one shape")
    return x


def declared() -> Any:
    """The operator, declared."""
    return sardonyx.custom_op(
        "declared::added(Tensor x, Tensor y, *, float scale=1.0) -> Tensor",
        cpp=_KERNEL,
        shape=_shape,
        dtypes=["float32"],
    )


def by_hand() -> float:
    """Build and load the operator that is written by hand; the seconds that it took."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "byhand.cpp", Path(folder) / "byhand.so"
        source.write_text(_BY_HAND)
        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
        command = ["g++", "-std=c++20", "-O3", "-fPIC", "-shared", *includes, str(source), "-o", str(library)]
        subprocess.run([*command, *libraries], check=True)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    return time.perf_counter() - started


def start() -> None:
    """In a process of its own: declare it, and run it in torch and in ONNX Runtime; prints the seconds."""
    import onnxruntime

    x = torch.ones(1)
    started = time.perf_counter()
    op = declared()
    in_torch = op(x, x)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(op.library))
    session = onnxruntime.InferenceSession(_one_node(), options)
    (in_ort,) = session.run(None, {"x": x.numpy(), "y": x.numpy()})
    assert in_torch.item() == in_ort.item() == 2
    print(time.perf_counter() - started)


def _one_node() -> bytes:
    from onnx import helper

    values = [helper.make_tensor_value_info(name, 1, ["n"]) for name in "xyz"]
    node = helper.make_node("added", ["x", "y"], ["z"], domain="declared")
    graph = helper.make_graph([node], "one", values[:2], values[2:])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("declared", 1)]
    serialized: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return serialized


def _starts() -> tuple[list[float], list[float]]:
    """Seconds from the declaration to results, with empty caches and with full ones."""
    cold: list[float] = []
    warm: list[float] = []
    for _ in range(_STARTS):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "SARDONYX_CACHE_DIR": folder}
            for seconds in (cold, warm):
                command = [sys.executable, "-m", "benchmarks.custom_op", "--start"]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                seconds.append(float(done.stdout.split()[-1]))
    return cold, warm


def _microseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    for _ in range(_CALLS):
        call()
    return (time.perf_counter() - started) / _CALLS * 1e6


def calls() -> dict[str, list[float]]:
    """Microseconds of a call, round by round."""
    x = torch.ones(1)
    ours, theirs = declared().operator, torch.ops.byhand.added.default
    ways: dict[str, Callable[[], Any]] = {
        "declared": lambda: ours(x, x, scale=2.0),
        "by hand": lambda: theirs(x, x, scale=2.0),
        "torch.add": lambda: torch.add(x, x, alpha=2.0),
    }
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for number in range(_ROUNDS + 1):
            for name, call in ways.items():
                taken = _microseconds(call)
                if number:
                    rounds[name].append(taken)
    return rounds


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.custom_op", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        start()
        return
    built, rounds = by_hand(), calls()
    cold, warm = _starts()
    table = Table("custom operator", ["what", "median", "fastest"], text_columns=1)
    for name, taken in rounds.items():
        table.add(f"a call, {name}, µs", f"{median(taken):.2f}", f"{min(taken):.2f}")
    more = median(a - b for a, b in zip(rounds["declared"], rounds["by hand"], strict=True))
    table.add("a call, declared − by hand, µs", f"{more:.2f}", "")
    table.add("declaration to results, empty caches, s", f"{median(cold):.2f}", f"{min(cold):.2f}")
    table.add("declaration to results, full caches, s", f"{median(warm):.3f}", f"{min(warm):.3f}")
    table.add("building by hand, for torch alone, s", f"{built:.1f}", "")
    table.show()
    if given.json:
        content = {**describe(), "calls": rounds, "cold": cold, "warm": warm, "by_hand": built}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
