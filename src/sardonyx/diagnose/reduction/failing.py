"""Test whether a part of a model fails in the same way as the whole model."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx

from sardonyx.diagnose.comparison.run_config import RunConfig
from sardonyx.diagnose.reduction.case import Array, Case
from sardonyx.diagnose.reduction.traced import TracedCase
from sardonyx.diagnose.reduction.worker import Outcome, Request, Worker, exception_outcome
from sardonyx.errors import SardonyxError

FailureKind: TypeAlias = Literal["wrong", "exception", "crash", "slow"]
Predicate: TypeAlias = Callable[[onnx.ModelProto, Mapping[str, Array]], bool]
AnyCase: TypeAlias = Case | TracedCase


@dataclass(frozen=True)
class FailureTest:
    """Tests whether a case fails in the same way as the whole model."""

    kind: str
    text: str
    """Message of the whole model's failure."""
    way: RunConfig
    against: RunConfig | None
    check: Callable[[AnyCase], str | None]
    """Returns the message of a case's failure; None if it does not fail in the same way."""
    tolerance: float | None = None


# By a predicate or a command


def by_predicate(predicate: Predicate, way: RunConfig, case: AnyCase) -> FailureTest:
    """Return a test by a predicate."""

    def check(part: AnyCase) -> str | None:
        return "the predicate holds" if predicate(part.model(), part.feeds()) else None

    return FailureTest("predicate", _require_failure("predicate", check(case)), way, None, check)


def by_command(command: str, way: RunConfig, limit: float, case: AnyCase) -> FailureTest:
    """Return a test by a command, which fails by a nonzero status, a signal, or a timeout."""
    line = command if "{model}" in command else f"{command} {{model}}"

    def check(part: AnyCase) -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            model, inputs = Path(folder, "model.onnx"), Path(folder, "inputs.npz")
            onnx.save(part.model(), str(model))
            np.savez(inputs, allow_pickle=False, **part.feeds())
            shell_line = line.replace("{model}", shlex.quote(str(model))).replace("{inputs}", shlex.quote(str(inputs)))
            try:
                done = subprocess.run(shell_line, shell=True, capture_output=True, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                return "the command timed out"
            if done.returncode in _CANNOT_RUN:
                raise SardonyxError(
                    f"the shell cannot run {command!r}", hint=done.stderr.decode(errors="replace").strip()
                )
            return f"the command exits with status {done.returncode}" if done.returncode else None

    return FailureTest("command", _require_failure("command", check(case)), way, None, check)


_CANNOT_RUN = (126, 127)
"""Exit statuses of a shell if a program is not found or not executable."""


def _require_failure(kind: str, text: str | None) -> str:
    if text is None:
        raise SardonyxError(f"the {kind} does not fail with the whole model", hint="reduce needs a model that fails")
    return text


# By running it


def by_running(
    worker: Worker,
    way: RunConfig,
    against: RunConfig,
    fails: FailureKind | None,
    tolerance: float | None,
    slower: float,
    limit: float,
    case: AnyCase,
) -> FailureTest:
    """Return a test by running cases, and comparing with a reference; finds out how the model fails if not given."""
    assert way.options is not None
    compares = fails in (None, "wrong", "slow")
    reference = against.options if compares else None
    request = Request(b"", {}, way.options, reference, tolerance=tolerance, timed=fails == "slow", limit=limit)
    runs = _IsolatedRun(worker, request, compares)
    first = runs(case)
    kind = _failure_kind(first, fails, slower, against, isinstance(case, TracedCase))
    compares = kind in ("wrong", "slow")
    message = normalize_message(first.text)
    if not compares:  # exceptions and crashes need no reference
        runs = _IsolatedRun(worker, replace(request, against=None), False)

    def check(part: AnyCase) -> str | None:
        outcome = runs(part)
        if kind == "slow":
            same = outcome.error >= slower
        else:
            same = outcome.kind == kind and (kind == "wrong" or normalize_message(outcome.text) == message)
        return _failure_text(kind, outcome) if same else None

    return FailureTest(kind, _failure_text(kind, first), way, against if compares else None, check, tolerance)


@dataclass(frozen=True)
class _IsolatedRun:
    """Runs a case in its own process, and optionally compares it with the reference."""

    worker: Worker
    request: Request
    compares: bool

    def __call__(self, part: AnyCase) -> Outcome:
        try:
            request = self._request(part)
        except Exception as error:
            if isinstance(part, TracedCase):
                return exception_outcome(error)  # from the export
            raise
        outcome = self.worker(request)
        if outcome.kind in ("crash", "timeout") and request.against is not None:  # was it the reference?
            alone = self.worker(replace(request, against=None))
            return replace(outcome, kind="incomparable") if alone.kind == "ran" else alone
        return outcome

    def _request(self, part: AnyCase) -> Request:
        expected = part.expected() if isinstance(part, TracedCase) and self.compares else None
        return replace(self.request, model=part.model().SerializeToString(), feeds=part.feeds(), expected=expected)


def _failure_kind(first: Outcome, fails: FailureKind | None, slower: float, against: RunConfig, is_traced: bool) -> str:
    """Return how the whole model fails; raise if it does not, or not in the given way."""
    if first.kind == "incomparable":
        raise SardonyxError(
            f"{against}, the reference, fails with the model itself: {first.text}",
            hint="choose another one by against, as 'onnxruntime:optimize=none,level=none'",
        )
    kind = "slow" if fails == "slow" and first.error >= slower else first.kind
    if kind == "ran" or fails not in (None, kind):
        raise SardonyxError(
            f"the model does not {_FAILING[fails]}: {_OUTCOMES.get(first.kind, first.kind)} {first.text}".rstrip(),
            hint="pass the inputs, the way or the tolerance that it fails with"
            + ("" if is_traced else "; with a module, against='torch' compares with torch"),
        )
    return kind


_FAILING: Mapping[Any, str] = {
    None: "crash, raise or give wrong results",
    "wrong": "give wrong results",
    "exception": "raise",
    "crash": "crash",
    "slow": "take that much longer",
}
_OUTCOMES = {"ran": "it ran", "wrong": "its results differ", "exception": "it raised", "crash": "it crashed"}


def _failure_text(kind: str, outcome: Outcome) -> str:
    if kind == "wrong":
        return f"results differ by {outcome.error:.2e} of their magnitude"
    return f"a call takes {outcome.error:.1f} times as long" if kind == "slow" else outcome.text


def normalize_message(text: str) -> str:
    """Remove names and numbers from a message, so that messages of the same failure are equal.

    >>> normalize_message("Name:'gather_12' idx=7 out of bounds") == normalize_message("Name:'y' idx=31 out of bounds")
    True
    """
    text = re.sub(r"\(node [^)]*\)|'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]", "…", text)
    return re.sub(r"-?\d+(\.\d+)?", "N", text)[:200]
