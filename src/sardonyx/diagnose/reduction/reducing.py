"""`reduce`: reduce a failing model to the smallest part that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from sardonyx import dtypes
from sardonyx.capture.example import as_module
from sardonyx.diagnose.comparison.run_config import RunConfig, RunConfigLike
from sardonyx.diagnose.comparison.subject import CallArguments, Model, subject_of
from sardonyx.diagnose.reduction import failing
from sardonyx.diagnose.reduction.case import Array, Case
from sardonyx.diagnose.reduction.failing import AnyCase, FailureKind, FailureTest, Predicate
from sardonyx.diagnose.reduction.recording import record_values
from sardonyx.diagnose.reduction.saving import save, save_traced
from sardonyx.diagnose.reduction.smaller import PASSES
from sardonyx.diagnose.reduction.traced import TRACED_PASSES, TracedCase
from sardonyx.diagnose.reduction.worker import Worker
from sardonyx.engines.registry import require
from sardonyx.errors import OptionError
from sardonyx.model_files import is_onnx

Progress: TypeAlias = Callable[[str], object]

_WAY, _AGAINST = "onnxruntime:optimize=none", "reference:optimize=none"
_SLOWER = 2.0
_LIMIT = 60.0


@dataclass(frozen=True)
class Reduction:
    """The result of `reduce`."""

    case: AnyCase
    """Nodes of the ONNX model, or calls of torch's graph if torch is the reference."""
    kind: str
    """How it fails: wrong, exception, crash, slow, predicate or command."""
    text: str
    """Message of the failure."""
    way: RunConfig
    against: RunConfig | None
    tolerance: float | None
    """Tolerance; None for that of `verify`."""
    before: int
    """Number of nodes of the original model."""
    tried: int
    seconds: float
    complete: bool
    """Whether all steps were taken, without a timeout or Ctrl-C."""

    @property
    def model(self) -> onnx.ModelProto:
        """The model that still fails."""
        return self.case.model()

    @property
    def feeds(self) -> dict[str, Array]:
        """Inputs with which it fails."""
        return self.case.feeds()

    @property
    def nodes(self) -> int:
        """Number of nodes of the reduced model."""
        return len(self.case.nodes)

    def save(self, folder: str | Path) -> Path:
        """Write model.onnx, inputs.npz, reproduce.py, which is self-contained, and a README of one line.

        Against torch, reproduce.py has the small graph in Python, and values.pt its values instead of inputs.npz.
        """
        failure = self.kind, self.text, self.way
        if isinstance(self.case, TracedCase):
            return save_traced(Path(folder), self.case, *failure, self.tolerance)
        return save(Path(folder), self.case, *failure, self.against, self.tolerance)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        entries = {name: getattr(self, name) for name in ("kind", "text", "before", "nodes", "tried", "complete")}
        inputs = {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in self.case.input_values.items()}
        return {**entries, "operators": self.case.operators, "inputs": inputs, "seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        operators = " ".join(self.case.operators[:12])
        early = "" if self.complete else ", stopped early"
        return (
            f"{self.before} nodes → {self.nodes}: {operators}\n{self.kind}: {self.text}\n"
            f"{self.tried} candidates in {self.seconds:.0f} s{early}"
        )


def reduce(
    model: Model,
    *args: Any,
    fails: FailureKind | Predicate | None = None,
    command: str | None = None,
    way: RunConfigLike = _WAY,
    against: RunConfigLike = _AGAINST,
    tolerance: float | None = None,
    slower: float = _SLOWER,
    minutes: float = 3.0,
    limit: float = _LIMIT,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Reduction:
    """Reduce a failing model to the smallest part that still fails in the same way.

    The model and its arguments are as in `compare`; a module is exported first. It fails if, run in this `way`, it
    crashes, raises, gives results that differ from those of `against` by more than `tolerance`, or takes `slower` times
    as long. `fails` says which; by default one of the first three is found out by running it. Each candidate runs in
    its own process, for at most `limit` seconds.

    With `against="torch"`, or "torch:float64", torch's graph is reduced: each part is exported separately, and torch is
    the reference. That finds a wrong translation, on which engines agree.

    `fails` may also be a predicate of a proto and its inputs; it runs in this process. `command` is a command line that
    fails, with `{model}` and `{inputs}` as placeholders for files.

    Intermediate values are recorded first, so that any part of the model can run alone. Then delta debugging removes
    nodes; sizes are shrunk, values simplified, attributes dropped. After `minutes`, or at Ctrl-C, it returns the best
    result so far.

    >>> import sardonyx, torch
    >>> program = sardonyx.export(lambda x: (x.sin().exp() + 1).log().cos(), (torch.ones(3),), optimize="none")
    >>> found = reduce(program, torch.ones(3), fails=lambda proto, feeds: "Log" in str(proto))
    >>> [node.op_type for node in found.model.graph.node]
    ['Log']
    """
    chosen, other = RunConfig.of(way), RunConfig.of(against)
    if chosen.is_torch:
        raise OptionError(
            "reduce needs an engine as way, and torch is not an engine",
            hint="use way='onnxruntime'; against='torch' makes torch the reference",
        )
    judged = command is None and not callable(fails)
    if judged:
        _check_engines(chosen, other)
    traced = other.is_torch and judged
    case = _traced_case(model, (args, kwargs), chosen, other, fails) if traced else _onnx_case(model, args, kwargs)
    engines = [way.options.engine for way in (chosen, other) if way.options is not None]
    worker = Worker(engines)
    try:
        if command is not None:
            test = failing.by_command(command, chosen, limit, case)
        elif callable(fails):
            test = failing.by_predicate(fails, chosen, case)
        else:
            test = failing.by_running(worker, chosen, other, fails, tolerance, slower, limit, case)
        return _Search(test, worker, time.monotonic() + 60 * minutes, progress or (lambda line: None)).run(case)
    finally:
        worker.close()


def _check_engines(*configs: RunConfig) -> None:
    """Raise for unknown or missing engines: in a candidate's process that would look like a failure."""
    for options in (config.options for config in configs):
        if options is not None and not options.compiler_path and not options.compiler_image:
            require(options.engine)


def _onnx_case(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Case:
    subject = subject_of(model, args, kwargs)
    feeds = {name: dtypes.to_array(x) for name, x in subject.calls[0].items()}
    return Case.of(ir.to_proto(subject.base), feeds)


def _traced_case(model: Model, call: CallArguments, way: RunConfig, against: RunConfig, fails: Any) -> TracedCase:
    if is_onnx(model):
        raise OptionError(
            f"{against} needs the module, but an ONNX model is given", hint="against='reference', or another engine"
        )
    if fails == "slow":
        raise OptionError("torch cannot be the reference for fails='slow'", hint="against='reference'")
    return TracedCase.of(as_module(model), call, way, against)


# The search


class _OutOfTime(Exception):
    """The time limit was reached."""


@dataclass
class _Search:
    test: FailureTest
    worker: Worker
    deadline: float
    progress: Progress
    tried: int = 0

    def run(self, case: AnyCase) -> Reduction:
        """Apply all passes; return the best case, even if it is interrupted."""
        started, before = time.monotonic(), len(case.nodes)
        self._best, self._text, self._step = case, self.test.text, ""
        complete = True
        try:
            self.progress("recording values")
            if isinstance(case, Case):
                case = record_values(case, self.worker, self.test.way)
            passes: Any = PASSES if isinstance(case, Case) else TRACED_PASSES
            for self._step, step in passes:
                case = step(case, self._fails)
        except (_OutOfTime, KeyboardInterrupt):
            complete = False
        seconds = time.monotonic() - started
        test = self.test
        return Reduction(
            self._best,
            test.kind,
            self._text,
            test.way,
            test.against,
            test.tolerance,
            before,
            self.tried,
            seconds,
            complete,
        )

    def _fails(self, case: AnyCase) -> bool:
        if time.monotonic() > self.deadline:
            raise _OutOfTime
        if not case.runs_alone:
            return False
        self.tried += 1
        self.progress(f"{self._step}: {len(self._best.nodes)} nodes left, candidate {self.tried}")
        text = self.test.check(case)
        if text is not None:
            self._best, self._text = case, text
        return text is not None
