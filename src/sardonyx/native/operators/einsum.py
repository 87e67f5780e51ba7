"""Einsum: for each operand its axes in one common order, then products and sums, two operands at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx.native.operators.products import MULTIPLIED, wide_type
from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import given, lowers, text_of, to_type, widened
from sardonyx.native.values import Value, View, dim_of

_ELLIPSIS = "."


@dataclass(frozen=True)
class _Term:
    """A value, and the name of each of its axes, no two of which are the same."""

    value: Value
    axes: tuple[str, ...]


@lowers("Einsum")
def _einsum(r: Lowering, node: ir.Node) -> None:
    operands = [given(r, node, index) for index in range(len(node.inputs))]
    dtype = operands[0].dtype
    if dtype not in MULTIPLIED or any(x.dtype != dtype for x in operands):
        raise CannotLower(f"Einsum of {', '.join(str(x.dtype) for x in operands)}")
    inputs, result = _parsed(text_of(node, "equation", ""), [len(x.dims) for x in operands])
    if len(operands) > 2:
        operands = [widened(r, x) for x in operands]
    terms = [_without_repeats(r, x, axes) for x, axes in zip(operands, inputs, strict=True)]
    joined = terms[0]
    for at, term in enumerate(terms[1:], 2):
        later = {*result, *(axis for other in terms[at:] for axis in other.axes)}
        joined = _multiplied(r, joined, term, later)
    joined = _summed(r, joined, set(result))
    r.give(node.outputs[0], to_type(r, _in_order(r, joined, result), dtype))


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The axes of each operand and of the result. Those of an ellipsis are named from the last on: .1, .0."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ranks):
        raise CannotLower(f"Einsum of {len(ranks)} operands by {equation!r}")
    inputs = [_axes(text, rank) for text, rank in zip(texts, ranks, strict=True)]
    most = max((sum(name.startswith(_ELLIPSIS) for name in axes) for axes in inputs), default=0)
    around = tuple(f"{_ELLIPSIS}{at}" for at in reversed(range(most)))
    if arrow:
        result = tuple(name for part in _split(right) for name in (around if part == _ELLIPSIS else (part,)))
    else:
        letters = [name for axes in inputs for name in axes if not name.startswith(_ELLIPSIS)]
        result = (*around, *sorted({name for name in letters if letters.count(name) == 1}))
    known = {name for axes in inputs for name in axes}
    if not known.issuperset(result) or len({*result}) != len(result):
        raise CannotLower(f"Einsum by {equation!r}")
    return inputs, result


def _split(text: str) -> list[str]:
    return list(text.replace("...", _ELLIPSIS))


def _axes(text: str, rank: int) -> tuple[str, ...]:
    parts = _split(text)
    around = rank - len(parts) + 1
    if parts.count(_ELLIPSIS) > 1 or around < 0 or (_ELLIPSIS not in parts and len(parts) != rank):
        raise CannotLower(f"Einsum of an operand of {rank} axes by {text!r}")
    names = [f"{_ELLIPSIS}{at}" for at in reversed(range(around))]
    return tuple(name for part in parts for name in (names if part == _ELLIPSIS else [part]))


def _without_repeats(r: Lowering, x: Value, axes: Sequence[str]) -> _Term:
    """The diagonal along axes of one name: a step along it is one along each."""
    unique = tuple(dict.fromkeys(axes))
    if len(unique) == len(axes):
        return _Term(x, unique)
    view = r.stored(x)
    places = [[i for i, other in enumerate(axes) if other == name] for name in unique]
    for same in places:
        if len({view.dims[i] for i in same}) > 1:
            raise CannotLower(f"a diagonal of sizes {[view.dims[i] for i in same]}")
    strides = tuple(dim_of(sum(view.strides[i] for i in same)) for same in places)
    return _Term(View(view.buffer, tuple(view.dims[same[0]] for same in places), strides, view.offset), unique)


def _summed(r: Lowering, term: _Term, kept: Iterable[str]) -> _Term:
    """Without the axes that nobody wants."""
    gone = [i for i, name in enumerate(term.axes) if name not in kept]
    if not gone:
        return term
    value = r.reduce("Sum", widened(r, term.value), gone, keep=False)
    return _Term(value, tuple(name for name in term.axes if name in kept))


def _multiplied(r: Lowering, one: _Term, other: _Term, later: set[str]) -> _Term:
    """The product of two, summed over the axes that are of no use later."""
    one = _summed(r, one, {*later, *other.axes})
    other = _summed(r, other, {*later, *one.axes})
    names = tuple(dict.fromkeys((*one.axes, *other.axes)))
    left, right = (_spread(r, term, names) for term in (one, other))
    if left.dtype != right.dtype:
        left, right = widened(r, left), widened(r, right)
    gone = [i for i, name in enumerate(names) if name not in later]
    if any(left.dims[i] == 1 or right.dims[i] == 1 for i in gone):
        return _summed(r, _Term(r.apply("mul", widened(r, left), widened(r, right)), names), later)
    if not gone:
        return _Term(r.apply("mul", left, right), names)
    product = r.product(r.stored(left), r.stored(right), gone, wide_type(left.dtype))
    return _Term(product, tuple(name for name in names if name in later))


def _in_order(r: Lowering, term: _Term, names: Sequence[str]) -> Value:
    return r.permute(term.value, [term.axes.index(name) for name in names])


def _spread(r: Lowering, term: _Term, names: Sequence[str]) -> Value:
    """With an axis for each name, of size one where it has none."""
    value = _in_order(r, term, [name for name in names if name in term.axes])
    return r.unsqueeze(value, [i for i, name in enumerate(names) if name not in term.axes])
