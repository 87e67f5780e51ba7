"""The values between the nodes of a model, recorded so that any part of it runs by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper

from sardonyx.diagnose.compare.way import Way
from sardonyx.diagnose.reduce.case import Array, Case
from sardonyx.diagnose.reduce.worker import Request, Worker

_REFERENCE = "reference"


def record(case: Case, worker: Worker, way: Way) -> Case:
    """The case with every value that can be had: computed without rewrites, node groups that fail being halved."""
    known: dict[str, Array] = dict(case.recorded)
    waiting: list[Sequence[onnx.NodeProto]] = [case.nodes]
    while waiting:
        block = waiting.pop()
        part = replace(case, nodes=tuple(block), recorded=known)
        found = _values(part, worker, way) if part.runs_alone else None
        if found is not None:
            known |= found
        elif len(block) > 1:
            half = len(block) // 2
            waiting += [block[half:], block[:half]]
        elif part.runs_alone:
            known |= _made_up(part)
    return replace(case, recorded=known)


def _values(part: Case, worker: Worker, way: Way) -> dict[str, Array] | None:
    """What the nodes compute, by the engine with nothing rewritten, or else by ONNX's own evaluator."""
    names = [name for node in part.nodes for name in node.output if name]
    model = part.model(names).SerializeToString()
    plain = way.plain().options
    assert plain is not None
    assert way.options is not None
    if isinstance(way.options.session_options, dict) and "custom_ops" in way.options.session_options:
        libraries = {"custom_ops": way.options.session_options["custom_ops"]}
        plain = replace(plain, session_options={**(plain.session_options or {}), **libraries})
    alone = len(part.nodes) == 1
    for options in (plain, replace(plain, engine=_REFERENCE, session_options=None))[: 1 + alone]:
        found = worker(Request(model, part.feeds(), options, wants_values=True))
        if found.kind == "ran":
            return dict(zip(names, found.values, strict=True))
    return None


def _made_up(part: Case) -> dict[str, Array]:
    """Numbers for what a node that does not run would give, where ONNX says of which type and size that is."""
    try:
        inferred = onnx.shape_inference.infer_shapes(part.model(), data_prop=True)
    except onnx.shape_inference.InferenceError:
        return {}
    draw = np.random.default_rng(0)
    found = {}
    for value in inferred.graph.output:
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type and kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            found[value.name] = draw.standard_normal(dims).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return found
