"""Infer dtypes and shapes of results with ONNX Runtime's own inference, which runs when a session loads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import onnx
import torch

from sardonyx.onnx_ops.nodes import Dim, NodeSpec, call_error, make_model, output_names
from sardonyx.onnx_ops.schemas import dtype_of

_CACHE_SIZE = 4096


@dataclass(frozen=True)
class ResultInfo:
    """The dtype and dims of a result; dims is None if the rank is unknown."""

    dtype: torch.dtype
    dims: tuple[Dim, ...] | None


@lru_cache(_CACHE_SIZE)
def infer_results(spec: NodeSpec) -> tuple[ResultInfo, ...]:
    """Return dtypes and dims of the results. Named dims are propagated; data-dependent ones are None.

    Each result gets a `Shape` node whose own size gives the rank: onnxruntime's Python API does not distinguish a
    scalar from a tensor of unknown rank.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # the message is in the exception too
    options.add_session_config_entry("session.strict_shape_type_inference", "1")
    names = output_names(spec)
    shapes = [onnx.helper.make_node("Shape", [name], [f"{name}_shape"]) for name in names]
    try:
        session = onnxruntime.InferenceSession(make_model(spec, shapes), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise call_error(spec.operator, f"onnxruntime rejects it: {_cause(error)}") from error
    outputs = {x.name: x for x in session.get_outputs()}
    return tuple(_result_info(spec, outputs[name], outputs[f"{name}_shape"].shape[0]) for name in names)


def _result_info(spec: NodeSpec, output: object, rank: object) -> ResultInfo:
    type_name, dims = str(output.type), output.shape  # type: ignore[attr-defined]  # onnxruntime has no types
    dtype = dtype_of(type_name)
    if dtype is None:
        raise call_error(spec.operator, f"its result is a {type_name}, which torch has no dtype for")
    return ResultInfo(dtype, tuple(dims) if isinstance(rank, int) else None)


def _cause(error: Exception) -> str:
    """Return ONNX Runtime's message without its error code prefix."""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error)).strip()
