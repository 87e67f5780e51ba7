"""The values between the nodes of a model, recorded so that any part of it runs by itself."""

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
    """How many bytes of values there may be."""

    asked: int = 2**26
    """Of one request: each is held several times on its way between processes."""
    held: int = 2**28
    """In memory; what is more lies in files that are mapped, which the system may drop from memory."""
    largest: int = 2**29
    """Of what one node computes; of one that computes more nothing is recorded."""


def record_values(case: Case, worker: Worker, way: RunConfig, bounds: Bounds | None = None) -> Case:
    """The case with every value that can be had: computed without rewrites, node groups that fail being halved.

    So are those that compute too much at a time.
    """
    bounds = bounds or Bounds()
    known: dict[str, Array] = dict(case.recorded)
    store = _Store(bounds.held)
    waiting: list[Sequence[onnx.NodeProto]] = [case.nodes]
    while waiting:
        block = waiting.pop()
        part = replace(case, nodes=tuple(block), recorded=known)
        size = _bytes(part, bounds.asked) if part.runs_alone else 0
        fits = part.runs_alone and size <= (bounds.asked if len(block) > 1 else bounds.largest)
        found = _compute_values(part, worker, way) if fits else None
        if found is not None:
            known |= store.keep(found)
        elif len(block) > 1:
            half = len(block) // 2
            waiting += [block[half:], block[:half]]
        elif fits:
            known |= store.keep(_random_outputs(part))
        elif part.runs_alone:
            log.warning("%s computes %d MB, which are not recorded", block[0].op_type, size >> 20)
    return replace(case, recorded=known)


_UNKNOWN = 16
"""A value of unknown size is taken to be this part of what may be asked for."""


def _bytes(part: Case, asked: int) -> int:
    """How much the nodes compute, as far as ONNX can tell: of one node that it cannot tell of, nothing."""
    try:
        inferred = onnx.shape_inference.infer_shapes(part.outline(), data_prop=True).graph
    except onnx.shape_inference.InferenceError:
        return 0
    sizes = {value.name: _size(value) for value in (*inferred.value_info, *inferred.output)}
    unknown = asked // _UNKNOWN if len(part.nodes) > 1 else 0
    return sum(unknown if (size := sizes.get(name)) is None else size for name in part.made)


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
    """Keeps arrays: in memory as long as they are few, then in files that go with the last array in them."""

    left: int
    """Bytes that may yet be held in memory."""

    def keep(self, found: Mapping[str, Array]) -> dict[str, Array]:
        """The same arrays, where they lie from now on."""
        large = {name: x for name, x in found.items() if x.nbytes > _SMALL and not x.dtype.hasobject}
        size = sum(x.nbytes for x in large.values())
        if size <= self.left:
            self.left -= size
            return dict(found)
        small = {name: x for name, x in found.items() if name not in large}
        try:
            return small | _memory_mapped(large)
        except OSError as error:
            log.warning("%d MB of values are not recorded: %s", size >> 20, error)
            return small


def _memory_mapped(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays in a file without a name; there is one for all, for each that is mapped stays open."""
    places: dict[str, int] = {}
    with tempfile.TemporaryFile() as file:
        for name, array in arrays.items():
            places[name] = file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
            file.write(array.tobytes())
        file.flush()
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {name: np.ndarray(x.shape, x.dtype, memory, places[name]) for name, x in arrays.items()}


def _compute_values(part: Case, worker: Worker, way: RunConfig) -> dict[str, Array] | None:
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


def _random_outputs(part: Case) -> dict[str, Array]:
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
