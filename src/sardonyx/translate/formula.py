"""Formulas in double precision: Python arithmetic over graph values, and tabulated functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dims
from sardonyx.translate.builder import Builder, Operand

_DEGREE = 5
_PIECES = 512


@dataclass(frozen=True, eq=False)
class Number:
    """A double tensor with Python arithmetic: `2 / (x + 1)` appends the nodes that compute it."""

    g: Builder
    value: ir.Value

    def apply(self, op_type: str, *others: Number | float) -> Number:
        """Apply an ONNX operator to this number and others."""
        return Number(self.g, self.g.node(op_type, [self.value, *map(self._value, others)]))

    def _value(self, other: Number | float) -> ir.Value:
        return other.value if isinstance(other, Number) else self.g.scalar(float(other), torch.float64)

    def like(self, number: float) -> Number:
        """Return a constant in the same graph."""
        return Number(self.g, self._value(number))

    def __add__(self, other: Number | float) -> Number:
        return self.apply("Add", other)

    def __sub__(self, other: Number | float) -> Number:
        return self.apply("Sub", other)

    def __mul__(self, other: Number | float) -> Number:
        return self.apply("Mul", other)

    def __truediv__(self, other: Number | float) -> Number:
        return self.apply("Div", other)

    def __pow__(self, other: Number | float) -> Number:
        return self.apply("Pow", other)

    def __radd__(self, other: float) -> Number:
        return self + other

    def __rsub__(self, other: float) -> Number:
        return self.like(other) - self

    def __rmul__(self, other: float) -> Number:
        return self * other

    def __rtruediv__(self, other: float) -> Number:
        return self.like(other) / self

    def __neg__(self) -> Number:
        return self.apply("Neg")

    def __abs__(self) -> Number:
        return self.apply("Abs")

    def __lt__(self, other: Number | float) -> ir.Value:
        return self.apply("Less", other).value

    def equals(self, other: Number | float) -> ir.Value:
        """Return where it equals this value."""
        return self.apply("Equal", other).value

    def where(self, condition: ir.Value, otherwise: Number | float) -> Number:
        """Return this where the condition holds, else `otherwise`."""
        return Number(self.g, self.g.Where(condition, self.value, self._value(otherwise)))

    def at_most(self, bound: Number | float) -> Number:
        """Return the smaller of the two; NaN is kept."""
        return self.apply("Min", bound)

    def at_least(self, bound: Number | float) -> Number:
        """Return the larger of the two; NaN is kept."""
        return self.apply("Max", bound)

    def exp(self) -> Number:
        """eˣ."""
        return self.apply("Exp")

    def log(self) -> Number:
        """Return the natural logarithm."""
        return self.apply("Log")

    def sqrt(self) -> Number:
        """Return the square root."""
        return self.apply("Sqrt")

    def sin(self) -> Number:
        """Return the sine."""
        return self.apply("Sin")

    def cos(self) -> Number:
        """Return the cosine."""
        return self.apply("Cos")

    def floor(self) -> Number:
        """Return the largest integer that is not larger."""
        return self.apply("Floor")

    def power_series(self, *coefficients: float) -> Number:
        """c₀ + c₁x + c₂x² + …"""
        total = self.like(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = total * self + coefficient
        return total


def number(g: Builder, x: Operand) -> Number:
    """Convert an operand to double; only for results of at most single precision, which leaves digits to spare."""
    if g.out.dtype == torch.float64:
        raise Unsupported("no formula that is accurate in double precision")
    return Number(g, g.cast(x, torch.float64))


def loop_numbers(
    rounds: ir.Value, start: Sequence[Number], step: Callable[[Number, Sequence[Number]], Sequence[Number]]
) -> list[Number]:
    """Return the state after `rounds` steps; each step receives its index, from zero, and the previous state."""
    g = start[0].g

    def body(count: ir.Value, state: Sequence[ir.Value]) -> list[ir.Value]:
        return [y.value for y in step(Number(g, g.cast(count, torch.float64)), [Number(g, x) for x in state])]

    return [Number(g, y) for y in loop_values(g, rounds, [x.value for x in start], body)]


def loop_values(
    g: Builder,
    rounds: ir.Value,
    start: Sequence[ir.Value],
    step: Callable[[ir.Value, Sequence[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Like `loop_numbers`, for tensors of any dtype; dtypes and sizes do not change."""
    with g.body() as nodes:
        count, condition = (_loop_input(g, dtype, ()) for dtype in (ir.DataType.INT64, ir.DataType.BOOL))
        state = [_loop_input(g, _dtype(x), g.dims(x)) for x in start]
        next_state = [g.shaped(y, g.dims(x)) for y, x in zip(step(count, state), start, strict=True)]
        results = [g.shaped(g.Identity(x), g.dims(x)) for x in (condition, *next_state)]
        body = ir.Graph([count, condition, *state], results, nodes=nodes, name=g.fresh("body"))
    outputs = g.several("Loop", len(start), [rounds, None, *start], body=body)
    for y, x in zip(outputs, start, strict=True):
        y.type = ir.TensorType(_dtype(x))
        g.shaped(y, g.dims(x))
    return list(outputs)


def _dtype(x: ir.Value) -> ir.DataType:
    assert x.dtype is not None, x
    return x.dtype


def _loop_input(g: Builder, dtype: ir.DataType, dims: Dims) -> ir.Value:
    return g.shaped(ir.Value(name=g.fresh("given"), type=ir.TensorType(dtype)), dims)


@dataclass(frozen=True, eq=False)
class Curve:
    """A smooth function over an interval, as piecewise polynomials that interpolate it at Chebyshev points.

    Torch computes the function in double precision when it is first needed, so no coefficients are stored. Outside the
    interval it has the value at the nearer end.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    low: float
    high: float

    @cached_property
    def coefficients(self) -> np.ndarray:
        """Return a row for each power, highest first, and a column for each piece."""
        points = (1 + np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))) / 2
        nodes = self.low + (np.arange(_PIECES)[:, None] + points) * ((self.high - self.low) / _PIECES)
        values = self.function(torch.from_numpy(nodes)).numpy()
        return np.linalg.solve(np.vander(points), values.T)

    def __call__(self, x: Number) -> Number:
        """Return the function of each element."""
        g = x.g
        position = (x.at_least(self.low).at_most(self.high) - self.low) * (_PIECES / (self.high - self.low))
        piece = position.where(g.Not(g.IsNaN(position.value)), 0).at_most(_PIECES - 1).floor()
        index, offset = g.cast(piece.value, torch.int64), position - piece
        terms = [Number(g, g.Gather(g.constant(row), index)) for row in np.ascontiguousarray(self.coefficients)]
        total = terms[0]
        for term in terms[1:]:
            g.shaped(term.value, g.dims(x.value))
            total = total * offset + term
        return total
