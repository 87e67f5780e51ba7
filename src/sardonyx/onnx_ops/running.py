"""Calls, run by ONNX Runtime: a session for each kind of call, kept, over the memory of torch's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.registry import find
from sardonyx.errors import EngineError
from sardonyx.onnx_ops.inference import inferred
from sardonyx.onnx_ops.limits import check_call, check_tensors
from sardonyx.onnx_ops.nodes import (
    Call,
    Dim,
    bound,
    described,
    input_names,
    inputs_of,
    may_be_sizes,
    model_of,
    output_names,
    refused,
)
from sardonyx.onnx_ops.schemas import Operator
from sardonyx.options import Options

_MOST = 2048
"""Sessions that are kept; the least recently used go."""
_LARGE = 2**16
"""Elements from which several threads are worth having: each session has threads of its own."""

_QUIET = {"log_severity_level": 4}  # what ONNX Runtime says of a call that fails is in the error

_sessions = LRU[Runner](_MOST)
_lock = fork.Lock()


def run(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The results of a call with tensors of the CPU."""
    given = bound(operator, args, kwargs)
    call = described(operator, given, _dims)
    tensors = [x.detach() for x in inputs_of(operator, given) if x is not None]
    check_tensors(operator, tensors)
    session = _session(call, sum(x.numel() for x in tensors) >= _LARGE)
    try:
        return session(tensors)
    except EngineError as error:
        raise refused(operator, error.what) from error


def _dims(tensor: torch.Tensor) -> tuple[Dim, ...]:
    return tuple(tensor.shape) if may_be_sizes(tensor) else (None,) * tensor.dim()


def _session(call: Call, large: bool) -> Runner:
    with _lock:
        kept = _sessions.get((call, large))
        if kept is None:
            check_call(call)
            kept = _loaded(call, torch.get_num_threads() if large else 1)
            _sessions.put((call, large), kept)
        return kept


def _loaded(call: Call, threads: int) -> Runner:
    job = Job(
        model=model_of(call),
        weights={},
        inputs=input_names(call),
        outputs=output_names(call),
        output_types=tuple(output.dtype for output in inferred(call)),
        output_shapes=(None,) * len(call.outputs),
        fixed=frozenset(),
        device=torch.device("cpu"),
        stream=None,
        options=Options.of({}, session_options=_QUIET | {"intra_op_num_threads": threads}),
    )
    try:
        return find("onnxruntime").load(job, None)
    except EngineError as error:
        raise refused(call.operator, error.what) from error
