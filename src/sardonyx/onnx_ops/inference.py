"""Types and sizes of results before there are any: ONNX Runtime's own inference, which a session does when it loads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import onnx
import torch

from sardonyx.onnx_ops.nodes import Call, Dim, model_of, output_names, refused
from sardonyx.onnx_ops.schemas import dtype_of

_MOST = 4096


@dataclass(frozen=True)
class Result:
    """What is known of a result; None in place of its sizes where not even their number is."""

    dtype: torch.dtype
    dims: tuple[Dim, ...] | None


@lru_cache(_MOST)
def inferred(call: Call) -> tuple[Result, ...]:
    """What the results of a call are like. Names of sizes are handed on, and what depends on values is None.

    Each result has a `Shape` beside it, of whose size the number of dimensions can be read: ONNX Runtime's interface
    for Python does not tell a tensor without dimensions from one of which nothing is known.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # what it says is in the error too
    options.add_session_config_entry("session.strict_shape_type_inference", "1")
    names = output_names(call)
    shapes = [onnx.helper.make_node("Shape", [name], [f"{name}_shape"]) for name in names]
    try:
        session = onnxruntime.InferenceSession(model_of(call, shapes), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise refused(call.operator, f"onnxruntime refuses it: {_cause(error)}") from error
    told = {x.name: x for x in session.get_outputs()}
    return tuple(_result(call, told[name], told[f"{name}_shape"].shape[0]) for name in names)


def _result(call: Call, told: object, rank: object) -> Result:
    spelled, dims = str(told.type), told.shape  # type: ignore[attr-defined]  # onnxruntime has no types
    dtype = dtype_of(spelled)
    if dtype is None:
        raise refused(call.operator, f"its result is a {spelled}, which torch has no dtype for")
    return Result(dtype, tuple(dims) if isinstance(rank, int) else None)


def _cause(error: Exception) -> str:
    """What ONNX Runtime says, without its own way of numbering errors."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error)).strip()
