"""How long an export takes and how large its graph is, beside torch.onnx.export: `python -m benchmarks.export`.

Both export the same model in turns, in one process and warm. What each made is checked by onnx and compared with eager
in onnxruntime and, where it is installed, in OpenVINO.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import onnx
import torch
from torch import nn

import sardonyx
from benchmarks.internals import difference
from benchmarks.machine import describe, note_if_busy
from benchmarks.models import MODELS, Case, make
from benchmarks.tables import Progress, Table, progress, say
from benchmarks.turns import Prepared, Suite

Shapes = tuple[dict[int, str], ...] | None


@dataclass
class Measured:
    """What one exporter did with one model."""

    case: str
    exporter: str
    seconds: list[float] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=dict)
    nodes: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    """The largest difference from eager, relative to the largest magnitude, by runtime."""
    failed: str | None = None

    @property
    def median(self) -> float:
        """Seconds of the middle round."""
        return median(self.seconds)


class _Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        hf = import_module("transformers")
        config = hf.LlamaConfig(
            hidden_size=256,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            intermediate_size=512,
            vocab_size=1024,
            use_cache=False,
        )
        self.model = hf.LlamaModel(config)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
        return result


def _llama(layers: int) -> Case:
    ids, mask = torch.randint(0, 1024, (2, 30)), torch.ones(2, 30, dtype=torch.int64)
    mask[1, :7] = 0
    return _Llama(layers).eval(), (ids, mask)


_ROWS: Shapes = ({0: "batch", 1: "length"}, {0: "batch", 1: "length"})

CASES: Mapping[str, tuple[Callable[[], Case], Shapes]] = {
    "llama 256×4": (partial(_llama, 4), None),
    "llama 256×4, dynamic": (partial(_llama, 4), _ROWS),
    "llama 256×16": (partial(_llama, 16), None),
    "llama 256×16, dynamic": (partial(_llama, 16), _ROWS),
    "bert-base": (MODELS["bert-base"], None),
    "resnet50": (MODELS["resnet50"], None),
}


def _ours(model: nn.Module, args: Any, shapes: Shapes) -> Any:
    return sardonyx.export(model, args, dynamic_shapes=shapes)


def _torchs(model: nn.Module, args: Any, shapes: Shapes) -> Any:
    dynamic = torch.export.Dim.DYNAMIC
    hints = tuple(dict.fromkeys(axes, dynamic) for axes in shapes) if shapes else None
    return torch.onnx.export(model, args, dynamo=True, verbose=False, dynamic_shapes=hints)


EXPORTERS: Mapping[str, Callable[[nn.Module, Any, Shapes], Any]] = {"torch.onnx.export": _torchs, "sardonyx": _ours}


SUITE = Suite("export", __doc__, tuple(CASES), tuple(EXPORTERS), ours=("sardonyx",))


def prepare(model: str, engine: str) -> Prepared:
    """The export, done once and checked; for `benchmarks.against`."""
    builder, shapes = CASES[model]
    module, args = make(builder)

    def export() -> Any:
        with _quiet():
            return EXPORTERS[engine](module, args, shapes)

    started = time.perf_counter()
    program = export()
    first = time.perf_counter() - started
    checked = Measured(model, engine)
    _check(checked, program, module, args)
    if checked.failed:
        raise RuntimeError(checked.failed)
    return Prepared(export, first, max(checked.errors.values()), None)


def measure(case: str, rounds: int, shown: Progress) -> list[Measured]:
    """Export once to warm up, then in turns; check what came out."""
    builder, shapes = CASES[case]
    model, args = make(builder)
    measured = [Measured(case, exporter) for exporter in EXPORTERS]
    programs: dict[str, Any] = {}
    for number in range(rounds + 1):
        shown.step(f"{case}: round {number} of {rounds}")
        for m in measured:
            with _quiet():
                started = time.perf_counter()
                programs[m.exporter] = EXPORTERS[m.exporter](model, args, shapes)
                seconds = time.perf_counter() - started
            if number:
                m.seconds.append(seconds)
    for m in measured:
        shown.step(f"{case}: checking {m.exporter}")
        _check(m, programs[m.exporter], model, args)
    return measured


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the other exporter prints of packages that are not installed."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _check(m: Measured, program: Any, model: nn.Module, args: Sequence[torch.Tensor]) -> None:
    m.nodes = sum(1 for _ in program.model.graph)
    if isinstance(program, sardonyx.Program):
        m.stages = dict(program.report.seconds)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        expected = model(*args)
        path = str(Path(folder) / "model.onnx")
        program.save(path)
        try:
            onnx.checker.check_model(path, full_check=True)
            for runtime, run in _RUNTIMES.items():
                if find_spec(runtime):
                    m.errors[runtime] = difference(run(path, args), expected)
        except Exception as error:
            m.failed = f"{type(error).__name__}: {error}"


def _in_onnxruntime(path: str, args: Sequence[torch.Tensor]) -> torch.Tensor:
    session = import_module("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return torch.from_numpy(session.run(None, {n: x.numpy() for n, x in zip(names, args, strict=True)})[0])


def _in_openvino(path: str, args: Sequence[torch.Tensor]) -> torch.Tensor:
    compiled = import_module("openvino").Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled([x.numpy() for x in args])[0])


_RUNTIMES = {"onnxruntime": _in_onnxruntime, "openvino": _in_openvino}


def _table(results: Sequence[Measured]) -> Table:
    runtimes = list(dict.fromkeys(name for m in results for name in m.errors))
    made = Table(
        "export", ["model", "exporter", "s", "÷ sardonyx", "nodes", *(f"error {r}" for r in runtimes)], text_columns=2
    )
    for m in results:
        ours = next(o for o in results if o.case == m.case and o.exporter == "sardonyx")
        errors = (f"{m.errors[r]:.1e}" if r in m.errors else "failed" for r in runtimes)
        made.add(m.case, m.exporter, f"{m.median:.2f}", f"{m.median / ours.median:.2f}", str(m.nodes), *errors)
        if m is ours:
            made.end_section()
    return made


def _depth(results: Sequence[Measured]) -> Iterator[str]:
    """How the time grows with the depth."""
    ours = {m.case: m.median for m in results if m.exporter == "sardonyx"}
    for suffix in ("", ", dynamic"):
        shallow, deep = ours.get(f"llama 256×4{suffix}"), ours.get(f"llama 256×16{suffix}")
        if shallow and deep:
            yield f"four times as deep{suffix}: {deep / shallow:.2f} times as long"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="exports of each model by each exporter")
    parser.add_argument("--only", help=f"a part of the names of models; of {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.only or given.only in case]
    machine, results = {**describe(), "busy_cores": note_if_busy()}, []
    with progress(len(cases) * (given.rounds + 1 + len(EXPORTERS))) as shown:
        for case in cases:
            results += measure(case, given.rounds, shown)
    _table(results).show()
    for line in _depth(results):
        say(line)
    for m in results:
        if m.failed:
            say(f"failed: {m.exporter} on {m.case}: {' '.join(m.failed.split())[:300]}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({**machine, "results": [asdict(m) for m in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
