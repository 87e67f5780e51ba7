"""Einsum: align the axes of the operands, then multiply and sum two operands at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx.native.operators.products import MULTIPLIED, wide_type
from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import lowers, operand, text_of, to_type, widened
from sardonyx.native.values import Value, View, dim_of

_ELLIPSIS = "."


@dataclass(frozen=True)
class _Term:
    """A value with a unique name for each axis."""

    value: Value
    axes: tuple[str, ...]


@lowers("Einsum")
def _einsum(r: Lowering, node: ir.Node) -> None:
    operands = [operand(r, node, index) for index in range(len(node.inputs))]
    dtype = operands[0].dtype
    if dtype not in MULTIPLIED or any(x.dtype != dtype for x in operands):
        raise CannotLower(f"Einsum of {', '.join(str(x.dtype) for x in operands)}")
    inputs, result = _parse_equation(text_of(node, "equation", ""), [len(x.dims) for x in operands])
    if len(operands) > 2:
        operands = [widened(r, x) for x in operands]
    terms = [_take_diagonal(r, x, axes) for x, axes in zip(operands, inputs, strict=True)]
    term = terms[0]
    for at, other in enumerate(terms[1:], 2):
        later = {*result, *(axis for remaining in terms[at:] for axis in remaining.axes)}
        term = _multiply(r, term, other, later)
    term = _sum_out(r, term, set(result))
    r.define(node.outputs[0], to_type(r, _permute_to(r, term, result), dtype))


def _parse_equation(equation: str, ranks: Sequence[int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the axes of each operand and of the result. Axes of an ellipsis are named .1, .0 to the last."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ranks):
        raise CannotLower(f"Einsum of {len(ranks)} operands by {equation!r}")
    inputs = [_axes(text, rank) for text, rank in zip(texts, ranks, strict=True)]
    max_ellipsis = max((sum(name.startswith(_ELLIPSIS) for name in axes) for axes in inputs), default=0)
    ellipsis_axes = tuple(f"{_ELLIPSIS}{at}" for at in reversed(range(max_ellipsis)))
    if arrow:
        result = tuple(name for part in _split(right) for name in (ellipsis_axes if part == _ELLIPSIS else (part,)))
    else:
        letters = [name for axes in inputs for name in axes if not name.startswith(_ELLIPSIS)]
        result = (*ellipsis_axes, *sorted({name for name in letters if letters.count(name) == 1}))
    known = {name for axes in inputs for name in axes}
    if not known.issuperset(result) or len({*result}) != len(result):
        raise CannotLower(f"Einsum by {equation!r}")
    return inputs, result


def _split(text: str) -> list[str]:
    return list(text.replace("...", _ELLIPSIS))


def _axes(text: str, rank: int) -> tuple[str, ...]:
    parts = _split(text)
    ellipsis_rank = rank - len(parts) + 1
    if parts.count(_ELLIPSIS) > 1 or ellipsis_rank < 0 or (_ELLIPSIS not in parts and len(parts) != rank):
        raise CannotLower(f"Einsum of an operand of {rank} axes by {text!r}")
    names = [f"{_ELLIPSIS}{at}" for at in reversed(range(ellipsis_rank))]
    return tuple(name for part in parts for name in (names if part == _ELLIPSIS else [part]))


def _take_diagonal(r: Lowering, x: Value, axes: Sequence[str]) -> _Term:
    """Return the diagonal along axes of the same name, by summing their strides."""
    unique = tuple(dict.fromkeys(axes))
    if len(unique) == len(axes):
        return _Term(x, unique)
    view = r.stored(x)
    positions = [[i for i, other in enumerate(axes) if other == name] for name in unique]
    for same in positions:
        if len({view.dims[i] for i in same}) > 1:
            raise CannotLower(f"a diagonal of sizes {[view.dims[i] for i in same]}")
    strides = tuple(dim_of(sum(view.strides[i] for i in same)) for same in positions)
    return _Term(View(view.buffer, tuple(view.dims[same[0]] for same in positions), strides, view.offset), unique)


def _sum_out(r: Lowering, term: _Term, kept: Iterable[str]) -> _Term:
    summed = [i for i, name in enumerate(term.axes) if name not in kept]
    if not summed:
        return term
    value = r.reduce("Sum", widened(r, term.value), summed, keep=False)
    return _Term(value, tuple(name for name in term.axes if name in kept))


def _multiply(r: Lowering, left_term: _Term, right_term: _Term, later: set[str]) -> _Term:
    """Multiply two terms, and sum over the axes not needed later."""
    left_term = _sum_out(r, left_term, {*later, *right_term.axes})
    right_term = _sum_out(r, right_term, {*later, *left_term.axes})
    names = tuple(dict.fromkeys((*left_term.axes, *right_term.axes)))
    left, right = (_align_axes(r, term, names) for term in (left_term, right_term))
    if left.dtype != right.dtype:
        left, right = widened(r, left), widened(r, right)
    summed = [i for i, name in enumerate(names) if name not in later]
    if any(left.dims[i] == 1 or right.dims[i] == 1 for i in summed):
        return _sum_out(r, _Term(r.apply("mul", widened(r, left), widened(r, right)), names), later)
    if not summed:
        return _Term(r.apply("mul", left, right), names)
    product = r.product(r.stored(left), r.stored(right), summed, wide_type(left.dtype))
    return _Term(product, tuple(name for name in names if name in later))


def _permute_to(r: Lowering, term: _Term, names: Sequence[str]) -> Value:
    return r.permute(term.value, [term.axes.index(name) for name in names])


def _align_axes(r: Lowering, term: _Term, names: Sequence[str]) -> Value:
    """Return the value with an axis for each name, of size one if it has none."""
    value = _permute_to(r, term, [name for name in names if name in term.axes])
    return r.unsqueeze(value, [i for i, name in enumerate(names) if name not in term.axes])
