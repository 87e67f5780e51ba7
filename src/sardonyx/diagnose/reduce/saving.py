"""A failing case as a folder that anyone can run: the model, its inputs, and a program of a few lines."""

from __future__ import annotations

import dataclasses
import pprint
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from sardonyx.diagnose.compare.errors import tolerance_of
from sardonyx.diagnose.compare.subject import tensor_of
from sardonyx.diagnose.compare.trace import run
from sardonyx.diagnose.compare.way import Way
from sardonyx.diagnose.reduce.case import Case
from sardonyx.options import Options
from sardonyx.translate import dtypes

_INPUTS = """\
import pathlib
import sys

import numpy as np

folder = pathlib.Path(__file__).parent
with np.load(folder / "inputs.npz") as held:
    feeds = {name: held[name] for name in held.files}
"""

_BY_ONNXRUNTIME = """\
import onnxruntime as ort

options = ort.SessionOptions()
"""

_CREATE = """\
session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
results = session.run(None, feeds)
"""

_BY_SARDONYX = """\
import torch

import sardonyx

program = sardonyx.optimize(str(folder / "model.onnx"), **{options})
results = program(*(torch.from_numpy(feeds[name]) for name in program.inputs))
results = [x.numpy() for x in (results if isinstance(results, tuple) else (results,))]
"""

_COMPARE = """\
with np.load(folder / "expected.npz") as held:
    expected = [held[f"arr_{{i}}"] for i in range(len(held.files))]
worst = 0.0
for result, right in zip(results, expected, strict=True):
    scale = max(float(np.abs(right).max(initial=0.0)), 1e-6)
    worst = max(worst, float(np.abs(result.astype("d") - right.astype("d")).max(initial=0.0)) / scale)
print(f"results differ by {{worst:.2e}} of their magnitude from what {against} computes")
sys.exit(worst > {tolerance})
"""

_SHOW = """\
for result in results:
    print(result.dtype, result.shape)
"""


def save(
    folder: Path, case: Case, kind: str, text: str, way: Way, against: Way | None, tolerance: float | None
) -> Path:
    """Write it; what is expected is computed once, so that the program needs no more than what it runs in."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(case.model(), str(folder / "model.onnx"))
    np.savez(folder / "inputs.npz", allow_pickle=False, **case.feeds())
    assert way.options is not None
    parts = [_INPUTS, _running(folder, way.options)]
    if kind == "wrong" and against is not None:
        allowed = _expect(folder, case, against)
        parts.append(_COMPARE.format(against=against, tolerance=allowed if tolerance is None else tolerance))
    else:
        parts.append(_SHOW)
    (folder / "reproduce.py").write_text(f"# {kind}: {_line(text)}\n" + "\n".join(parts))
    operators = ", ".join(dict.fromkeys(node.op_type for node in case.nodes))
    (folder / "README.md").write_text(
        f"`python reproduce.py` shows it: {kind} in {way}, {len(case.nodes)} node(s): {operators}. {_line(text)}\n"
    )
    return folder


def _line(text: str) -> str:
    return " ".join(text.split())


def _expect(folder: Path, case: Case, against: Way) -> float:
    """Write what the results should be; what they may differ by."""
    assert against.options is not None
    feeds = {name: tensor_of(x) for name, x in case.feeds().items()}
    results = run(ir.from_proto(case.model()), against.options, feeds)
    np.savez(folder / "expected.npz", *(dtypes.to_array(x) for x in results))
    return max(map(tolerance_of, results), default=0.0)


def _running(folder: Path, options: Options) -> str:
    """The lines that run the model: onnxruntime's alone where nothing of this package is at work."""
    alone = options.optimize in ("none", False) and options.native is not True
    if options.engine != "onnxruntime" or not alone:
        default = Options()
        changed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
        changed = {name: x for name, x in changed.items() if x != getattr(default, name)}
        return _BY_SARDONYX.replace("{options}", pprint.pformat(changed))
    given = options.session_options if isinstance(options.session_options, Mapping) else {}
    lines = [f"options.add_session_config_entry({k!r}, {str(v)!r})" for k, v in given.get("config", {}).items()]
    for library in map(Path, given.get("custom_ops", ())):
        shutil.copyfile(library, folder / library.name)
        lines.append(f"options.register_custom_ops_library(str(folder / {library.name!r}))")
    for name, value in given.items():
        if name not in ("config", "custom_ops"):
            written = f"ort.{type(value).__name__}.{value.name}" if hasattr(value, "name") else repr(value)
            lines.append(f"options.{name} = {written}")
    return _BY_ONNXRUNTIME + "".join(f"{line}\n" for line in lines) + _CREATE
