"""Whole models with native kernels and without: `python -m benchmarks.native_models`.

A model is what `torch.onnx.export` gives, and what `sardonyx.export` gives, with its rules applied; either is compiled
by `native.compile(model, measure=inputs)`. Files from packages that are installed are compiled as `sardonyx.optimize`
gives them. The sessions with kernels and without take turns in one process, as ONNX Runtime optimises them, all
fusions allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch.utils import _pytree as pytree

import sardonyx
from benchmarks.machine import describe, note_if_busy, run_on_cores
from benchmarks.models import MODELS, build
from benchmarks.tables import Table, milliseconds, progress, say
from sardonyx import native
from sardonyx.native.session import open_session

_ROUND_SECONDS = 0.2
_PAUSE_SECONDS = 0.06
"""The threads of a session spin for 40 ms after a run; the other must not share the cores with them."""
GATES = {
    ("llama-decode", "torch.onnx"): 1.15,
    ("llama-step", "torch.onnx"): 1.15,
    ("llama-step", "sardonyx"): 1.15,
    ("bert-base", "torch.onnx"): 1.04,
}
"""How many times as fast a model has to be; others at least as fast, but for what measuring itself varies by."""
_AS_FAST = 0.98
_DOUBT = 5
"""What reads below its gate is measured for so many times as long, and all rounds count: a model without any kernel,
which is the same in both sessions, reads anything from 0.97 to 1.04 in seven."""
_FILES = {"silero_vad": "data/*.onnx", "magika": "models/*/model.onnx"}
"""Packages that have ONNX files in them, and where."""


@dataclass(frozen=True)
class Subject:
    """A model in one form."""

    form: str
    """Who exported it."""
    before: ir.Model
    """As it runs without kernels."""
    compiled: native.NativeModel
    feeds: Mapping[str, Any]
    expected: list[torch.Tensor]


@dataclass
class Measured:
    """What a model took without kernels and with them."""

    model: str
    form: str
    threads: int
    kernels: int
    put_back: int
    nodes: tuple[int, int]
    error: float
    """The largest difference from PyTorch, or from the file as it is, as a part of the largest number."""
    without: list[float] = field(default_factory=list)
    """Seconds of a call, round by round."""
    native: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """How many times as fast it is with kernels: the median over rounds, in which both took their turn."""
        return median(before / after for before, after in zip(self.without, self.native, strict=True))

    @property
    def gate(self) -> float:
        """What the ratio has to be."""
        return GATES.get((self.model, self.form), _AS_FAST)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        seconds = {"without_seconds": median(self.without), "native_seconds": median(self.native)}
        return {**asdict(self), **seconds, "ratio": self.ratio, "gate": self.gate}


class Runner:
    """A session, and what it is run with."""

    def __init__(self, model: ir.Model, library: Path | None, feeds: Mapping[str, Any], threads: int) -> None:
        options = onnxruntime.SessionOptions()
        run_on_cores(options, threads)
        options.log_severity_level = 3
        self._session, self._feeds = open_session(model, library, options), dict(feeds)
        self._calls = 1
        for _ in range(3):
            self._calls = max(2, round(_ROUND_SECONDS / self.round()))

    def results(self) -> list[torch.Tensor]:
        """The outputs of a call."""
        return [torch.from_numpy(array) for array in self._session.run(None, self._feeds)]

    def round(self) -> float:
        """Seconds of a call, the mean over one round."""
        time.sleep(_PAUSE_SECONDS)
        run, feeds = self._session.run, self._feeds
        run(None, feeds)
        started = time.perf_counter()
        for _ in range(self._calls):
            run(None, feeds)
        return (time.perf_counter() - started) / self._calls


# What is measured


def of_module(module: torch.nn.Module, args: tuple[Any, ...]) -> Iterator[Subject]:
    """A module as each exporter writes it."""
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        expected = [x for x in pytree.tree_leaves(module(*args)) if isinstance(x, torch.Tensor)]
        program = torch.onnx.export(module, args, dynamo=True, verbose=False)
        assert program is not None
    tensors = [x.numpy() for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    for form, model in (("torch.onnx", program.model), ("sardonyx", sardonyx.export(module, args).model)):
        feeds = dict(zip((str(x.name) for x in model.graph.inputs), tensors, strict=True))
        yield Subject(form, model, native.compile(model, measure=feeds), feeds, expected)


def of_file(path: Path) -> Iterator[Subject]:
    """A file that somebody else wrote."""
    before = ir.load(path)
    feeds = {str(x.name): _made_up(x) for x in before.graph.inputs}
    session = open_session(before, None)
    expected = [torch.from_numpy(array) for array in session.run(None, feeds)]
    yield Subject("file", before, native.compile(sardonyx.optimize(path), measure=feeds), feeds, expected)


def _made_up(value: ir.Value) -> Any:
    """Something for an input: bytes, a rate of sound, a piece of sound, what was heard before it."""
    if value.dtype == ir.DataType.INT32:
        return np.random.default_rng(0).integers(0, 256, (1, 2048), np.int32)
    if value.dtype == ir.DataType.INT64:
        return np.array(16000)
    if value.name == "input":
        return np.random.default_rng(0).standard_normal((1, 576)).astype(np.float32)
    assert value.shape is not None
    return np.zeros([dim if isinstance(dim, int) else 1 for dim in value.shape], np.float32)


def _example(name: str) -> Mapping[str, Any]:
    folder = Path(__file__).parents[1] / "examples" / "native"
    sys.path.insert(0, str(folder))
    try:
        return runpy.run_path(str(folder / f"{name}.py"))
    finally:
        sys.path.remove(str(folder))


def llama_step() -> Iterator[Subject]:
    """A Llama that has 255 tokens before the one it reads, and gives its keys and values back."""
    torch.manual_seed(0)
    step = _example("llama_decode")["Step"](4, 512).eval()
    yield from of_module(step, (torch.tensor([[17]]), torch.tensor([[255]]), step.past(255)))


def minilm() -> Iterator[Subject]:
    """The trained sentence encoder all-MiniLM-L6-v2, with four sentences."""
    made = _example("minilm")
    yield from of_module(*made["load"](made["SENTENCES"]))


def files() -> dict[str, Callable[[], Iterator[Subject]]]:
    """The ONNX files of packages that are installed, by the name of each."""
    found: dict[str, Callable[[], Iterator[Subject]]] = {}
    for package, pattern in _FILES.items():
        spec = importlib.util.find_spec(package)
        folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path("absent")
        for path in sorted(folder.glob(pattern)):
            name = path.stem if path.stem.startswith(package) else package
            found[name.replace("_", "-")] = partial(of_file, path)
    return found


def subjects() -> dict[str, Callable[[], Iterator[Subject]]]:
    """Everything that can be measured, by name."""
    suite = {name: partial(_of_suite, name) for name in MODELS}
    return {**suite, "llama-step": llama_step, "minilm": minilm, **files()}


def _of_suite(name: str) -> Iterator[Subject]:
    yield from of_module(*build(name))


# Measuring


def measure(name: str, subject: Subject, threads: int, rounds: int) -> Measured:
    """Let the sessions take turns."""
    compiled, report = subject.compiled, subject.compiled.report
    runners = [
        Runner(subject.before, None, subject.feeds, threads),
        Runner(compiled.model, compiled.library, subject.feeds, threads),
    ]
    pairs = zip(runners[1].results(), subject.expected, strict=True)
    error = max(((found - wanted).abs().max() / wanted.abs().max()).item() for found, wanted in pairs)
    nodes = (report.nodes_before, report.nodes_after)
    found = Measured(name, subject.form, threads, len(report.kernels), len(report.put_back), nodes, error)
    _take_turns(found, runners, rounds)
    if found.ratio < found.gate:
        _take_turns(found, runners, (_DOUBT - 1) * rounds)
    return found


def _take_turns(found: Measured, runners: Sequence[Runner], rounds: int) -> None:
    for _ in range(rounds):
        found.without.append(runners[0].round())
        found.native.append(runners[1].round())


def table(results: Sequence[Measured]) -> Table:
    """A row for each model, form and number of threads."""
    columns = [
        "model",
        "exported by",
        "threads",
        "nodes",
        "kernels",
        "without ms",
        "native ms",
        "times",
        "gate",
        "error",
    ]
    made = Table("models with native kernels", columns, text_columns=2)
    for index, m in enumerate(results):
        nodes, gate = f"{m.nodes[0]} → {m.nodes[1]}", f"{m.gate:g}" + " !" * (m.ratio < m.gate)
        times = (milliseconds(median(m.without)), milliseconds(median(m.native)), f"{m.ratio:.2f}")
        made.add(m.model, m.form, f"{m.threads}", nodes, f"{m.kernels}", *times, gate, f"{m.error:.0e}")
        if index + 1 == len(results) or results[index + 1].model != m.model:
            made.end_section()
    return made


def main() -> None:
    """Measure, show, and write what was measured."""
    known = subjects()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_models", description=__doc__)
    parser.add_argument("--models", default=",".join(known), help="names, with commas between them")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, with commas between them")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each session")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    asked = parser.parse_args()
    names = asked.models.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(known)}")
    logging.disable(logging.WARNING)  # what torch.onnx tells of its steps
    busy, results = note_if_busy(), []
    with progress(len(names)) as shown:
        for name in names:
            shown.step(name)
            for subject in known[name]():
                results += [measure(name, subject, int(n), asked.rounds) for n in asked.threads.split(",")]
    table(results).show()
    below = [f"{m.model} of {m.form} (threads: {m.threads}, ×{m.ratio:.2f})" for m in results if m.ratio < m.gate]
    say(f"below their gates: {', '.join(below) or 'none'}")
    if asked.json:
        content = {**describe(), "busy_cores": busy, "results": [m.as_dict() for m in results]}
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
