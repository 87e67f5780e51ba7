"""What a model computes in double precision, and how far from it rounding may carry the types it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

_ROUNDING = {
    TensorProto.FLOAT: 2.0**-24,
    TensorProto.DOUBLE: 2.0**-53,
    TensorProto.FLOAT16: 2.0**-11,
    TensorProto.BFLOAT16: 2.0**-8,
}
"""By type, how much of itself a number may lose where it is rounded once."""
_COMPARING = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"})
_TRIALS = 6
_FACTOR = 16.0
"""So many times the farthest of the trials is still the work of rounding: there are more roundings than trials show."""


class Pad(OpRun):
    """Pad with a constant, also by less than nothing, which onnx's own does not know."""

    def _run(
        self, x: np.ndarray, pads: np.ndarray, fill: np.ndarray | None = None, **how: object
    ) -> tuple[np.ndarray, ...]:
        before, after = np.split(pads, 2)
        inner = tuple(slice(max(0, -b), d - max(0, -a)) for b, a, d in zip(before, after, x.shape, strict=True))
        around = [(max(0, b), max(0, a)) for b, a in zip(before, after, strict=True)]
        return (np.pad(x[inner], around, constant_values=0 if fill is None else fill.item()),)


class Softsign(OpRun):
    """Softsign, of a single number too, which onnx's own does not take."""

    def _run(self, x: np.ndarray, **how: object) -> tuple[np.ndarray, ...]:
        return (np.asarray(x / (1 + np.abs(x))),)


class Erf(OpRun):
    """The error function in double precision, which onnx's own gives in single."""

    def _run(self, x: np.ndarray, **how: object) -> tuple[np.ndarray, ...]:
        return (_erf(x),)


class HardSwish(OpRun):
    """HardSwish with a sixth in double precision."""

    def _run(self, x: np.ndarray, **how: object) -> tuple[np.ndarray, ...]:
        return (x * np.clip(x / 6 + 0.5, 0, 1),)


class Gelu(OpRun):
    """Gelu with its constants in double precision."""

    def _run(self, x: np.ndarray, approximate: str = "none", **how: object) -> tuple[np.ndarray, ...]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (x / 2 * (1 + _erf(x / math.sqrt(2))),)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_OURS = [Pad, Softsign, Erf, HardSwish, Gelu]


class Overflows(Exception):
    """A number of the graph is larger than its type holds: what comes of it depends on what is kept where."""


@dataclass(frozen=True)
class Precise:
    """The outputs of a model in double precision, and for each how large an error may be."""

    values: Sequence[np.ndarray]
    bounds: Sequence[float]


def precise(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> Precise:
    """Compute a model in double precision: as it is, and with the operands of each node moved as rounding moves them.

    An implementation whose nodes each compute the exact result of operands that are off by a rounding is as far from
    the exact results as the farthest of some such trials, or some times as far; and the last results are rounded too,
    as are the exact ones of a model in double precision.
    """
    types = _types(model)
    evaluator = ReferenceEvaluator(_doubled(model), new_ops=_OURS)
    given = {name: _wide(array) for name, array in feeds.items()}
    exact = _outputs(evaluator, given, lambda name, array: _within(array, types.get(name)))
    trials = [_outputs(evaluator, given, _Moved(types, seed)) for seed in range(_TRIALS)]
    farthest = [max(_distance(trial[i], x) for trial in trials) for i, x in enumerate(exact)]
    names = [output.name for output in model.graph.output]
    for name, x in zip(names, exact, strict=True):
        _within(x, types[name])
    rounded = (4 * _ROUNDING.get(types[name], 0.0) * _largest(x) for name, x in zip(names, exact, strict=True))
    return Precise(exact, [_FACTOR * far + last for far, last in zip(farthest, rounded, strict=True)])


def _types(model: onnx.ModelProto) -> dict[str, int]:
    graph = model.graph
    infos = (*graph.input, *graph.output, *graph.value_info)
    return {x.name: x.type.tensor_type.elem_type for x in infos} | {x.name: x.data_type for x in graph.initializer}


def _doubled(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every real number in double precision."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.graph.value_info[:]
    for info in (*made.graph.input, *made.graph.output):
        if info.type.tensor_type.elem_type in _ROUNDING:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    for held in made.graph.initializer:
        held.CopyFrom(numpy_helper.from_array(_wide(numpy_helper.to_array(held)), held.name))
    for node in made.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _ROUNDING:
                attribute.i = TensorProto.DOUBLE
    return made


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16 else array


def _outputs(
    evaluator: ReferenceEvaluator, given: Mapping[str, np.ndarray], seen: Callable[[str, np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """The results of a model whose nodes see their operands as a function shows them."""
    values: dict[str, np.ndarray | None] = {"": None, **evaluator.rt_inits_, **given}
    with np.errstate(all="ignore"):
        for node in evaluator.rt_nodes_:
            shown = [_shown(node.onnx_node, name, values[name], seen) for name in node.input]
            values |= zip(node.output, node.run(*shown), strict=False)  # some give results that nobody asked for
    return [np.asarray(values[name]) for name in evaluator.output_names]


def _shown(
    node: onnx.NodeProto, name: str, array: np.ndarray | None, seen: Callable[[str, np.ndarray], np.ndarray]
) -> np.ndarray | None:
    is_real = array is not None and array.dtype == np.float64
    return seen(name, array) if is_real and array is not None and node.op_type not in _COMPARING else array


def _within(array: np.ndarray, kind: int | None) -> np.ndarray:
    """The same, if its type holds such numbers."""
    if kind == TensorProto.FLOAT16 and np.abs(array).max(initial=0.0) > float(np.finfo(np.float16).max):
        raise Overflows
    return array


class _Moved:
    """Shows numbers as they are when each was rounded, up or down."""

    def __init__(self, types: Mapping[str, int], seed: int) -> None:
        self._types, self._draw = types, np.random.default_rng(seed)

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        """With a rounding of its type."""
        by = _ROUNDING.get(self._types.get(name, TensorProto.DOUBLE), 0.0)
        return array * (1.0 + by * self._draw.uniform(-1.0, 1.0, array.shape))


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    if one.dtype.kind != "f":
        return 0.0
    finite = np.isfinite(one) & np.isfinite(other)
    return float(np.abs(one - other)[finite].max(initial=0.0))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) if array.dtype.kind == "f" else 0.0


def differences(found: Sequence[np.ndarray], wanted: Precise) -> Iterator[tuple[str, float]]:
    """For each output how it differs from what it should be, in words or none, and the error as a part of its bound."""
    for index, (a, b, bound) in enumerate(zip(found, wanted.values, wanted.bounds, strict=True)):
        if a.shape != b.shape:
            yield f"output {index} has the sizes {a.shape} instead of {b.shape}", np.inf
        elif b.dtype.kind != "f":
            unequal = int((a != b).sum())
            yield f"{unequal} of {a.size} differ in output {index}" if unequal else "", 0.0
        else:
            yield _real_difference(index, _wide(a), b, bound + float(np.finfo(np.float32).tiny))


def _real_difference(index: int, a: np.ndarray, b: np.ndarray, bound: float) -> tuple[str, float]:
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, a), np.where(finite, 0, b), equal_nan=True):
        return f"output {index} has {a[~finite][:4]} instead of {b[~finite][:4]}", np.inf
    error = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return (
        f"output {index} is off by {error:.3g}, and {bound:.3g} is allowed" if not error <= bound else ""
    ), error / bound
