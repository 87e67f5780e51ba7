"""The process that runs candidates: it imports everything once, and forks for each, so that they are isolated."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator
from torch.utils.dlpack import from_dlpack

from sardonyx import dtypes
from sardonyx.diagnose.comparison.errors import error_of, tolerance_of
from sardonyx.diagnose.comparison.subject import subject_of, tensor_of
from sardonyx.diagnose.comparison.trace import prepare_model, runner
from sardonyx.diagnose.reduction.worker import Outcome, Request, exception_outcome
from sardonyx.engines.onnxruntime import session_options
from sardonyx.engines.ortvalue import from_torch
from sardonyx.engines.registry import find as find_engine
from sardonyx.native.session import onnxruntime
from sardonyx.options import Options
from sardonyx.timing import in_turns


def serve(connection: Connection) -> None:
    """Answer requests until the connection is closed."""
    while True:
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_run_isolated(request))


def _run_isolated(request: Request) -> Outcome:
    """Run a request in a forked process."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        _answer(request, Connection(write))
        os._exit(0)
    os.close(write)
    with Connection(read) as connection:
        in_time = connection.poll(request.limit)
        try:
            answer = connection.recv() if in_time else None
        except (EOFError, OSError):
            answer = None
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not in_time:
        return Outcome("timeout", f"no answer within {request.limit:g} s")
    if isinstance(answer, Outcome):
        return answer
    code = os.waitstatus_to_exitcode(status)
    return Outcome("crash", signal.Signals(-code).name if code < 0 else f"exit status {code}")


def _answer(request: Request, connection: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    try:
        outcome = _evaluate(request)
    except Exception as error:
        outcome = exception_outcome(error)
    connection.send(outcome)


def _evaluate(request: Request) -> Outcome:
    feeds = {name: tensor_of(array) for name, array in request.feeds.items()}
    call = _call(request.model, request.options, feeds)
    results = call()
    if request.wants_values:
        return Outcome("ran", values=[dtypes.to_array(x) for x in results])
    if request.expected is not None:
        return _compare(results, [tensor_of(x) for x in request.expected], request)
    if request.against is None:
        return Outcome("ran")
    try:
        reference = _call(request.model, request.against, feeds)
        expected = reference()
    except Exception as error:
        return replace(exception_outcome(error), kind="incomparable")
    if request.timed:
        ours, others = in_turns([call, reference], rounds=_ROUNDS)
        return Outcome("ran", error=min(ours) / max(min(others), 1e-9))
    return _compare(results, expected, request)


def _compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], request: Request) -> Outcome:
    pairs = list(zip(results, expected, strict=True))
    allowed = [tolerance_of(a) if request.tolerance is None else request.tolerance for a, _ in pairs]
    over = [error_of(a, b) for (a, b), least in zip(pairs, allowed, strict=True) if not error_of(a, b) <= least]
    return Outcome("wrong" if over else "ran", error=max(over, default=0.0))


def _call(model: bytes, options: Options, feeds: dict[str, torch.Tensor]) -> Any:
    rewrites = options.optimize not in ("none", False) or options.native is True
    if not rewrites and options.engine in _DIRECT_ENGINES:
        return _DIRECT_ENGINES[options.engine](model, options, feeds)
    proto = onnx.load_model_from_string(model)
    if rewrites:
        call = runner(*prepare_model(options, subject_of(proto, (feeds,) if feeds else (), {})))
    else:
        call = runner(ir.from_proto(proto), options)
    return lambda: call(feeds)


def _onnxruntime_call(model: bytes, options: Options, feeds: dict[str, torch.Tensor]) -> Any:
    ort = onnxruntime()
    session = ort.InferenceSession(
        model, session_options(ort, options.session_options), providers=["CPUExecutionProvider"]
    )
    values = {name: ort.OrtValue(from_torch(x)) for name, x in feeds.items()}
    names = [x.name for x in session.get_outputs()]
    kinds = [str(x.type) for x in session.get_outputs()]

    def call() -> list[torch.Tensor]:
        results = session.run_with_ort_values(names, values)
        return [_ort_to_torch(value, kind) for value, kind in zip(results, kinds, strict=True)]

    return call


def _ort_to_torch(value: Any, kind: str) -> torch.Tensor:
    if kind != "tensor(bfloat16)":
        return torch.as_tensor(value.numpy())
    return from_dlpack(value._ortvalue.to_dlpack())


def _reference_call(model: bytes, options: Options, feeds: dict[str, torch.Tensor]) -> Any:
    evaluator = ReferenceEvaluator(onnx.load_model_from_string(model))
    arrays = {name: dtypes.to_array(x) for name, x in feeds.items()}
    return lambda: [tensor_of(np.asarray(x)) for x in evaluator.run(None, arrays)]


_ROUNDS = 3
_DIRECT_ENGINES = {"onnxruntime": _onnxruntime_call, "reference": _reference_call}
"""Engines that candidates are passed to directly: our preparation of a graph takes longer than running it."""


if __name__ == "__main__":
    for name in sys.argv[2:]:
        find_engine(name).probe()  # imports its packages once, before forking
    serve(Connection(int(sys.argv[1])))
