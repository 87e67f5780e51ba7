"""Whether a part of a model fails in the way that the whole does."""

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
    """Whether a case fails, in the way that the whole model does."""

    kind: str
    text: str
    """What the failure of the whole model says."""
    way: RunConfig
    against: RunConfig | None
    asks: Callable[[AnyCase], str | None]
    """What a case's failure says; None if it does not fail so."""
    tolerance: float | None = None


# By what others say


def by_predicate(predicate: Predicate, way: RunConfig, case: AnyCase) -> FailureTest:
    """It fails where a function says so."""

    def asks(part: AnyCase) -> str | None:
        return "the predicate holds" if predicate(part.model(), part.feeds()) else None

    return FailureTest("predicate", _require_failure("predicate", asks(case)), way, None, asks)


def by_command(command: str, way: RunConfig, limit: float, case: AnyCase) -> FailureTest:
    """It fails where a command does: its status is not zero, or it is killed or takes too long."""
    line = command if "{model}" in command else f"{command} {{model}}"

    def asks(part: AnyCase) -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            model, inputs = Path(folder, "model.onnx"), Path(folder, "inputs.npz")
            onnx.save(part.model(), str(model))
            np.savez(inputs, allow_pickle=False, **part.feeds())
            said = line.replace("{model}", shlex.quote(str(model))).replace("{inputs}", shlex.quote(str(inputs)))
            try:
                done = subprocess.run(said, shell=True, capture_output=True, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                return "the command takes too long"
            if done.returncode in _CANNOT_RUN:
                raise SardonyxError(
                    f"a shell cannot run {command!r}", hint=done.stderr.decode(errors="replace").strip()
                )
            return f"the command ends with status {done.returncode}" if done.returncode else None

    return FailureTest("command", _require_failure("command", asks(case)), way, None, asks)


_CANNOT_RUN = (126, 127)
"""What a shell ends with where a program is not there, or is none."""


def _require_failure(kind: str, text: str | None) -> str:
    if text is None:
        raise SardonyxError(f"the {kind} does not fail with the whole model", hint="it has to, before it is cut")
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
    """It fails where it does so by itself, or beside what counts as right; how is found out where nothing says it."""
    assert way.options is not None
    compares = fails in (None, "wrong", "slow")
    other = against.options if compares else None
    request = Request(b"", {}, way.options, other, tolerance=tolerance, timed=fails == "slow", limit=limit)
    runs = _IsolatedRun(worker, request, compares)
    first = runs(case)
    kind = _failure_kind(first, fails, slower, against, isinstance(case, TracedCase))
    compares = kind in ("wrong", "slow")
    if not compares:  # what raises needs nothing to compare with
        runs = _IsolatedRun(worker, replace(request, against=None), False)

    def asks(part: AnyCase) -> str | None:
        now = runs(part)
        if kind == "slow":
            same = now.error >= slower
        else:
            same = now.kind == kind and (
                kind == "wrong" or normalize_message(now.text) == normalize_message(first.text)
            )
        return _failure_text(kind, now) if same else None

    return FailureTest(kind, _failure_text(kind, first), way, against if compares else None, asks, tolerance)


@dataclass(frozen=True)
class _IsolatedRun:
    """A case run in a process of its own, and compared with what counts as right where that is wanted."""

    worker: Worker
    request: Request
    compares: bool

    def __call__(self, part: AnyCase) -> Outcome:
        try:
            given = self._request(part)
        except Exception as error:
            if isinstance(part, TracedCase):
                return exception_outcome(error)  # it is exported here
            raise
        now = self.worker(given)
        if now.kind in ("crash", "timeout") and given.against is not None:  # of which of the two?
            alone = self.worker(replace(given, against=None))
            return replace(now, kind="incomparable") if alone.kind == "ran" else alone
        return now

    def _request(self, part: AnyCase) -> Request:
        expected = part.expected() if isinstance(part, TracedCase) and self.compares else None
        return replace(self.request, model=part.model().SerializeToString(), feeds=part.feeds(), expected=expected)


def _failure_kind(first: Outcome, fails: FailureKind | None, slower: float, against: RunConfig, is_traced: bool) -> str:
    """How the whole model fails; an error where it does not, or not so."""
    if first.kind == "incomparable":
        raise SardonyxError(
            f"{against}, which counts as right, fails with the model itself: {first.text}",
            hint="name another by against, as 'onnxruntime:optimize=none,level=none'",
        )
    found = "slow" if fails == "slow" and first.error >= slower else first.kind
    if found == "ran" or fails not in (None, found):
        raise SardonyxError(
            f"the model does not {_FAILING[fails]}: {_OUTCOMES.get(first.kind, first.kind)} {first.text}".rstrip(),
            hint="give the inputs that it fails with, the way it is run in, or another tolerance"
            + ("" if is_traced else "; with a module, against='torch' compares with torch"),
        )
    return found


_FAILING: Mapping[Any, str] = {
    None: "crash, raise or give other results",
    "wrong": "give other results",
    "exception": "raise",
    "crash": "crash",
    "slow": "take so much longer",
}
_OUTCOMES = {"ran": "it ran", "wrong": "its results differ", "exception": "it raised", "crash": "it crashed"}


def _failure_text(kind: str, outcome: Outcome) -> str:
    if kind == "wrong":
        return f"results differ by {outcome.error:.2e} of their magnitude"
    return f"a call takes {outcome.error:.1f} times as long" if kind == "slow" else outcome.text


def normalize_message(text: str) -> str:
    """What two messages of the same failure have in common: names and numbers are left out.

    >>> alike("Name:'gather_12' idx=7 out of bounds") == alike("Name:'y' idx=31 out of bounds")
    True
    """
    text = re.sub(r"\(node [^)]*\)|'[^']*'|\"[^\"]*\"|\{[^}]*\}|\[[^\]]*\]", "…", text)
    return re.sub(r"-?\d+(\.\d+)?", "N", text)[:200]
