"""Record the intermediate values of a model, so that any part of it can run alone."""

from __future__ import annotations

import logging
import math
import mmap
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper

from sardonyx.diagnose.comparison.run_config import RunConfig
from sardonyx.diagnose.reduction.case import Array, Case
from sardonyx.diagnose.reduction.worker import Request, Worker

log = logging.getLogger(__name__)

_REFERENCE = "reference"


@dataclass(frozen=True)
class Bounds:
    """Limits of the bytes of recorded values."""

    asked: int = 2**26
    """Of one request: values are copied several times between processes."""
    in_memory: int = 2**28
    """In memory; the rest is in memory-mapped files."""
    largest: int = 2**29
    """Of the outputs of one node; larger outputs are not recorded."""


def record_values(case: Case, worker: Worker, way: RunConfig, bounds: Bounds | None = None) -> Case:
    """Return the case with all values that can be computed without rewrites.

    Groups of nodes that fail, or compute too many bytes at a time, are halved.
    """
    bounds = bounds or Bounds()
    known: dict[str, Array] = dict(case.recorded)
    store = _Store(bounds.in_memory)
    pending: list[Sequence[onnx.NodeProto]] = [case.nodes]
    while pending:
        block = pending.pop()
        part = replace(case, nodes=tuple(block), recorded=known)
        size = _bytes(part, bounds.asked) if part.runs_alone else 0
        fits = part.runs_alone and size <= (bounds.asked if len(block) > 1 else bounds.largest)
        values = _compute_values(part, worker, way) if fits else None
        if values is not None:
            known |= store.put(values)
        elif len(block) > 1:
            half = len(block) // 2
            pending += [block[half:], block[:half]]
        elif fits:
            known |= store.put(_random_outputs(part))
        elif part.runs_alone:
            log.warning("%s computes %d MB, which is too much to record", block[0].op_type, size >> 20)
    return replace(case, recorded=known)


_UNKNOWN = 16
"""Fraction of the limit of a request that a value of unknown size is assumed to take."""


def _bytes(part: Case, asked: int) -> int:
    """Return the bytes that the nodes compute, by shape inference; 0 for a single node of unknown size."""
    try:
        inferred = onnx.shape_inference.infer_shapes(part.outline(), data_prop=True).graph
    except onnx.shape_inference.InferenceError:
        return 0
    sizes = {value.name: _size(value) for value in (*inferred.value_info, *inferred.output)}
    unknown = asked // _UNKNOWN if len(part.nodes) > 1 else 0
    return sum(unknown if (size := sizes.get(name)) is None else size for name in part.computed)


def _size(value: onnx.ValueInfoProto) -> int | None:
    kind = value.type.tensor_type
    if not kind.elem_type or not kind.HasField("shape") or not all(x.HasField("dim_value") for x in kind.shape.dim):
        return None
    width = int(helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize)
    return math.prod(int(dim.dim_value) for dim in kind.shape.dim) * width


_SMALL = 2**12
"""Bytes up to which an array stays in memory."""
_ALIGNED = 64


@dataclass
class _Store:
    """Stores arrays: in memory up to a limit, then in files that are deleted with their last array."""

    bytes_left: int
    """Bytes that may still be stored in memory."""

    def put(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Store arrays, and return them in their new memory."""
        large = {name: x for name, x in arrays.items() if x.nbytes > _SMALL and not x.dtype.hasobject}
        size = sum(x.nbytes for x in large.values())
        if size <= self.bytes_left:
            self.bytes_left -= size
            return dict(arrays)
        small = {name: x for name, x in arrays.items() if name not in large}
        try:
            return small | _memory_mapped(large)
        except OSError as error:
            log.warning("%d MB of values are not recorded: %s", size >> 20, error)
            return small


def _memory_mapped(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Write arrays to one anonymous file and map it: each mapped file keeps a file descriptor open."""
    offsets: dict[str, int] = {}
    with tempfile.TemporaryFile() as file:
        for name, array in arrays.items():
            offsets[name] = file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
            file.write(array.tobytes())
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {name: np.ndarray(x.shape, x.dtype, memory, offsets[name]) for name, x in arrays.items()}


def _compute_values(part: Case, worker: Worker, way: RunConfig) -> dict[str, Array] | None:
    """Compute the outputs of the nodes by the engine without optimizations, else by ONNX's reference evaluator."""
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
        outcome = worker(Request(model, part.feeds(), options, wants_values=True))
        if outcome.kind == "ran":
            return dict(zip(names, outcome.values, strict=True))
    return None


def _random_outputs(part: Case) -> dict[str, Array]:
    """Return random outputs for a node that fails, if shape inference gives their types and shapes."""
    try:
        inferred = onnx.shape_inference.infer_shapes(part.model(), data_prop=True)
    except onnx.shape_inference.InferenceError:
        return {}
    generator = np.random.default_rng(0)
    arrays = {}
    for value in inferred.graph.output:
        kind = value.type.tensor_type
        dims = [dim.dim_value for dim in kind.shape.dim]
        if kind.elem_type and kind.HasField("shape") and all(dim.HasField("dim_value") for dim in kind.shape.dim):
            arrays[value.name] = generator.standard_normal(dims).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return arrays
