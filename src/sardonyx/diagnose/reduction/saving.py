"""Write a failing case as a folder: the model, its inputs, and a short program that reproduces the failure."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.diagnose.comparison.errors import tolerance_of
from sardonyx.diagnose.comparison.run_config import RunConfig
from sardonyx.diagnose.comparison.subject import tensor_of
from sardonyx.diagnose.comparison.trace import run
from sardonyx.diagnose.reduction.case import Case
from sardonyx.diagnose.reduction.traced import TracedCase
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import SardonyxError
from sardonyx.options import Options
from sardonyx.telemetry.repro_code import class_source, constants, custom_operators

_INPUTS = """\
import pathlib
import sys

import numpy as np

folder = pathlib.Path(__file__).parent
with np.load(folder / "inputs.npz") as file:
    feeds = {name: file[name] for name in file.files}
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

program = sardonyx.optimize(str(folder / "model.onnx"), {options})
results = program(*(torch.from_numpy(feeds[name]) for name in program.inputs))
results = [x.numpy() for x in (results if isinstance(results, tuple) else (results,))]
"""

_COMPARE = """\
with np.load(folder / "expected.npz") as file:
    expected = [file[f"arr_{{i}}"] for i in range(len(file.files))]
worst = 0.0
for result, reference in zip(results, expected, strict=True):
    scale = max(float(np.abs(reference).max(initial=0.0)), 1e-6)
    worst = max(worst, float(np.abs(result.astype("d") - reference.astype("d")).max(initial=0.0)) / scale)
print(f"results differ by {{worst:.2e}} of their magnitude from what {against} computes")
sys.exit(worst > {tolerance})
"""

_TRACED = """\
VALUES = torch.load(pathlib.Path(__file__).parent / "values.pt", weights_only=True)


{graph}

with torch.no_grad():
    program = sardonyx.export(Graph().eval(), VALUES["inputs"], {options})
    results = program(*VALUES["inputs"])
"""

_COMPARE_TRACED = """\
errors = list(map(error_of, results, VALUES["expected"]))
print(f"results differ by {{max(errors):.2e}} of their magnitude from what {against} computes")
sys.exit(any(not error <= allowed for error, allowed in zip(errors, {allowed}, strict=True)))
"""

_SHOW = """\
for result in results:
    print(result.dtype, result.shape)
"""


def save(
    folder: Path, case: Case, kind: str, text: str, way: RunConfig, against: RunConfig | None, tolerance: float | None
) -> Path:
    """Write a case; expected results are computed once, so that the program does not need the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(case.model(), str(folder / "model.onnx"))
    np.savez(folder / "inputs.npz", allow_pickle=False, **case.feeds())
    assert way.options is not None
    parts = [_INPUTS, _run_lines(folder, way.options)]
    if kind == "wrong" and against is not None:
        allowed = _write_expected(folder, case, against)
        parts.append(_COMPARE.format(against=against, tolerance=allowed if tolerance is None else tolerance))
    else:
        parts.append(_SHOW)
    (folder / "reproduce.py").write_text(f"# {kind}: {_one_line(text)}\n" + "\n".join(parts), encoding="utf-8")
    return _write_readme(folder, case, kind, text, way)


def save_traced(folder: Path, case: TracedCase, kind: str, text: str, way: RunConfig, tolerance: float | None) -> Path:
    """Write a torch graph as Python source, its values, and the exported model."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"inputs": list(case.input_values.values()), "expected": case.results(), **constants(case.module)}
    torch.save(values, folder / "values.pt")
    with contextlib.suppress(SardonyxError):  # the failure may be that it cannot be exported
        onnx.save(case.model(), str(folder / "model.onnx"))
    imports, source = class_source(case.module)
    assert way.options is not None
    parts = [
        f"import pathlib\nimport sys\n\n{imports}\n",
        "import sardonyx\nfrom sardonyx.diagnose.comparison.errors import error_of\n",
        *(f"# The operator {name} must be registered first.\n" for name in custom_operators(case.module)),
        _TRACED.format(graph=source, options=_keywords(way.options)),
    ]
    if kind == "wrong":
        allowed = [tolerance_of(case.recorded[x]) if tolerance is None else tolerance for x in case.outputs]
        parts.append(_COMPARE_TRACED.format(against=case.against, allowed=allowed))
    else:
        parts.append(_SHOW)
    (folder / "reproduce.py").write_text(f"# {kind}: {_one_line(text)}\n" + "\n".join(parts), encoding="utf-8")
    return _write_readme(folder, case, kind, text, way)


def _write_readme(folder: Path, case: Case | TracedCase, kind: str, text: str, way: RunConfig) -> Path:
    operators = ", ".join(dict.fromkeys(case.operators))
    failure = f"{kind} in {way}, {len(case.nodes)} node(s): {operators}. {_one_line(text)}"
    (folder / "README.md").write_text(f"`python reproduce.py` reproduces it: {failure}\n", encoding="utf-8")
    return folder


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _write_expected(folder: Path, case: Case, against: RunConfig) -> float:
    """Write the expected results; return their tolerance."""
    assert against.options is not None
    feeds = {name: tensor_of(x) for name, x in case.feeds().items()}
    results = run(ir.from_proto(case.model()), against.options, feeds)
    np.savez(folder / "expected.npz", *(dtypes.to_array(x) for x in results))
    return max(map(tolerance_of, results), default=0.0)


def _run_lines(folder: Path, options: Options) -> str:
    """Return the lines that run the model: with onnxruntime only, if this package does not rewrite it."""
    alone = options.optimize in ("none", False) and options.native is not True
    if not find_engine(options.engine).takes_session_options or not alone:
        return _BY_SARDONYX.replace("{options}", _keywords(options))
    session = options.session_options if isinstance(options.session_options, Mapping) else {}
    lines = [f"options.add_session_config_entry({k!r}, {str(v)!r})" for k, v in session.get("config", {}).items()]
    for library in map(Path, session.get("custom_ops", ())):
        shutil.copyfile(library, folder / library.name)
        lines.append(f"options.register_custom_ops_library(str(folder / {library.name!r}))")
    for name, value in session.items():
        if name not in ("config", "custom_ops"):
            lines.append(f"options.{name} = {_literal(value, 'ort')}")
    return _BY_ONNXRUNTIME + "".join(f"{line}\n" for line in lines) + _CREATE


def _keywords(options: Options) -> str:
    """Return the options that differ from the defaults, as keyword arguments in source."""
    changed = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return ", ".join(f"{name}={_literal(x)}" for name, x in changed.items() if x != getattr(Options(), name))


def _literal(value: Any, ort: str = "__import__('onnxruntime')") -> str:
    """Return a value as a Python literal; onnxruntime's constants by name."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_literal(x, ort)}" for key, x in value.items()) + "}"
    return f"{ort}.{type(value).__name__}.{value.name}" if hasattr(value, "name") else repr(value)
