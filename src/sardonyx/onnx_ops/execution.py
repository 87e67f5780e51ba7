"""Run calls with ONNX Runtime, on torch's memory: one cached session per node spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.registry import find
from sardonyx.errors import EngineError
from sardonyx.onnx_ops.inference import infer_results
from sardonyx.onnx_ops.limits import check_call, check_tensors
from sardonyx.onnx_ops.nodes import (
    Dim,
    NodeSpec,
    bind_arguments,
    call_error,
    input_names,
    inputs_of,
    make_model,
    may_be_sizes,
    node_spec,
    output_names,
)
from sardonyx.onnx_ops.schemas import Operator
from sardonyx.options import Options

_MAX_SESSIONS = 2048
"""Size of the LRU of sessions."""
_MULTITHREADED_FROM = 2**16
"""Number of elements from which a session gets several threads: each session has its own pool."""

_QUIET = {"log_severity_level": 4}  # the message of a failed call is in the exception

_sessions = LRU[Runner](_MAX_SESSIONS)
_lock = fork.Lock()


def run(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the results of a call with CPU tensors."""
    arguments = bind_arguments(operator, args, kwargs)
    spec = node_spec(operator, arguments, _dims)
    tensors = [x.detach() for x in inputs_of(operator, arguments) if x is not None]
    check_tensors(operator, tensors)
    session = _session(spec, sum(x.numel() for x in tensors) >= _MULTITHREADED_FROM)
    try:
        return session(tensors)
    except EngineError as error:
        raise call_error(operator, error.what) from error


def _dims(tensor: torch.Tensor) -> tuple[Dim, ...]:
    return tuple(tensor.shape) if may_be_sizes(tensor) else (None,) * tensor.dim()


def _session(spec: NodeSpec, large: bool) -> Runner:
    with _lock:
        session = _sessions.get((spec, large))
        if session is None:
            check_call(spec)
            session = _load(spec, torch.get_num_threads() if large else 1)
            _sessions.put((spec, large), session)
        return session


def _load(spec: NodeSpec, threads: int) -> Runner:
    job = Job(
        model=make_model(spec),
        weights={},
        inputs=input_names(spec),
        outputs=output_names(spec),
        output_types=tuple(output.dtype for output in infer_results(spec)),
        output_shapes=(None,) * len(spec.outputs),
        fixed=frozenset(),
        device=torch.device("cpu"),
        options=Options.of({}, session_options=_QUIET | {"intra_op_num_threads": threads}),
    )
    try:
        return find("onnxruntime").load(job, None)
    except EngineError as error:
        raise call_error(spec.operator, error.what) from error
