"""Reduction passes: fewer nodes, smaller sizes, simpler values, fewer attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from sardonyx.diagnose.bisection.delta import minimal_subset
from sardonyx.diagnose.reduction.case import Array, Arrays, Case, reads_of

Fails = Callable[[Case], bool]


def fewer_nodes(case: Case, fails: Fails) -> Case:
    """Remove nodes: trim both ends by binary search, then find a minimal subset."""
    nodes = case.nodes
    last = _binary_search(lambda count: fails(case.of_nodes(nodes[:count])), 1, len(nodes))
    nodes = nodes[:last]
    first = len(nodes) - _binary_search(lambda count: fails(case.of_nodes(nodes[-count:])), 1, len(nodes))
    nodes = nodes[first:]
    needed = minimal_subset(nodes, lambda part: fails(case.of_nodes(part)))
    return case.of_nodes(needed or nodes)


def _binary_search(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest number for which a condition holds; it holds for `high`."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def bypass_nodes(case: Case, fails: Fails) -> Case:
    """Remove nodes whose output can be replaced by one of their inputs, with the same dtype and shape."""
    for node in reversed(case.nodes):
        if len(case.nodes) > 1 and len(node.output) == 1 and node.output[0] not in case.ends:
            for name in node.input:
                shorter = _bypass(case, node, name)
                if shorter is not None and fails(shorter):
                    case = shorter
                    break
    return case


def _bypass(case: Case, node: onnx.NodeProto, instead: str) -> Case | None:
    output, source = case.recorded.get(node.output[0]), case.recorded.get(instead, case.weights.get(instead))
    if output is None or source is None or output.shape != source.shape or output.dtype != source.dtype:
        return None
    rest = []
    for reader in case.nodes:
        if reader is not node:
            fresh = onnx.NodeProto()
            fresh.CopyFrom(reader)
            for i, name in enumerate(fresh.input):
                fresh.input[i] = instead if name == node.output[0] else name
            rest.append(fresh)
    if any(node.output[0] in reads_of(reader) for reader in rest):
        return None  # a subgraph reads it
    return case.of_nodes(rest)


def simplify_values(case: Case, fails: Fails) -> Case:
    """Replace weights and inputs by ones or random values, if the case still fails."""
    for make in (_ones, _random):
        every = _replace_arrays(case, {name: make(x) for name, x in _float_arrays(case).items()})
        if fails(every):
            return every
    for name, array in _float_arrays(case).items():
        for make in (_ones, _random):
            if fails(changed := _replace_arrays(case, {name: make(array)})):
                case = changed
                break
    return case


def _float_arrays(case: Case) -> dict[str, Array]:
    """Return the floating-point arrays: integers may be indices and sizes."""
    known = {**case.recorded, **case.weights}
    return {name: known[name] for name in case.read if known[name].dtype.kind not in "biuSUO"}


def _ones(array: Array) -> Array:
    return np.ones_like(array)


def _random(array: Array) -> Array:
    return np.asarray(np.random.default_rng(0).standard_normal(array.shape)).astype(array.dtype)


def _replace_arrays(case: Case, arrays: Arrays) -> Case:
    weights = {**case.weights, **{name: x for name, x in arrays.items() if name in case.weights}}
    recorded = {**case.recorded, **{name: x for name, x in arrays.items() if name not in case.weights}}
    return replace(case, weights=weights, recorded=recorded)


def shrink_sizes(case: Case, fails: Fails) -> Case:
    """Shrink sizes: all axes of one size are sliced to a smaller one, in inputs and weights."""
    for size in sorted({d for name in case.read for d in _array(case, name).shape if d > 1}, reverse=True):
        for less in _smaller_sizes(size):
            if fails(changed := _resized(case, size, less)):
                case = changed
                break
    return case


def _smaller_sizes(size: int) -> Iterator[int]:
    yield from dict.fromkeys(x for x in (1, 2, 3, 4, size // 8, size // 4, size // 2) if 0 < x < size)


def _array(case: Case, name: str) -> Array:
    return case.weights[name] if name in case.weights else case.recorded[name]


def _resized(case: Case, size: int, less: int) -> Case:
    """Slice every array, and replace that size in constant shapes too."""
    changed: dict[str, Array] = {}
    for name in case.read:
        array = _array(case, name)
        if array.dtype == np.int64 and array.ndim <= 1 and array.size <= 8:
            array = np.where(array == size, less, array).astype(np.int64)
        changed[name] = np.ascontiguousarray(array[tuple(slice(less if d == size else None) for d in array.shape)])
    return _replace_arrays(case, changed)


def drop_attributes(case: Case, fails: Fails) -> Case:
    """Remove attributes that the failure does not need."""
    nodes: list[Any] = list(case.nodes)
    for at, node in enumerate(nodes):
        for attribute in node.attribute:
            fresh = onnx.NodeProto()
            fresh.CopyFrom(nodes[at])
            others = [x for x in fresh.attribute if x.name != attribute.name]
            del fresh.attribute[:]
            fresh.attribute.extend(others)
            attempt = [*nodes[:at], fresh, *nodes[at + 1 :]]
            if fails(case.of_nodes(attempt)):
                nodes = attempt
    return case.of_nodes(nodes)


PASSES: tuple[tuple[str, Callable[[Case, Fails], Case]], ...] = (
    ("fewer nodes", fewer_nodes),
    ("bypassing nodes", bypass_nodes),
    ("smaller sizes", shrink_sizes),
    ("simpler values", simplify_values),
    ("fewer attributes", drop_attributes),
    ("fewer nodes", fewer_nodes),
)
"""Passes in order; each starts from the result of the previous one."""
