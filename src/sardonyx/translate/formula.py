"""Formulas in double precision: Python's arithmetic over graph values, and functions looked up in tables."""

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
    """A tensor of doubles with Python's arithmetic: `2 / (x + 1)` appends the nodes that compute it."""

    g: Builder
    value: ir.Value

    def apply(self, op_type: str, *others: Number | float) -> Number:
        """An ONNX operator over this number and others."""
        return Number(self.g, self.g.node(op_type, [self.value, *map(self._value, others)]))

    def _value(self, other: Number | float) -> ir.Value:
        return other.value if isinstance(other, Number) else self.g.scalar(float(other), torch.float64)

    def like(self, number: float) -> Number:
        """A constant of the same graph."""
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
        """Where it has this value."""
        return self.apply("Equal", other).value

    def where(self, condition: ir.Value, otherwise: Number | float) -> Number:
        """This where the condition holds."""
        return Number(self.g, self.g.Where(condition, self.value, self._value(otherwise)))

    def at_most(self, bound: Number | float) -> Number:
        """The smaller of the two; NaN stays."""
        return self.apply("Min", bound)

    def at_least(self, bound: Number | float) -> Number:
        """The larger of the two; NaN stays."""
        return self.apply("Max", bound)

    def exp(self) -> Number:
        """eˣ."""
        return self.apply("Exp")

    def log(self) -> Number:
        """The natural logarithm."""
        return self.apply("Log")

    def sqrt(self) -> Number:
        """The square root."""
        return self.apply("Sqrt")

    def sin(self) -> Number:
        """The sine."""
        return self.apply("Sin")

    def cos(self) -> Number:
        """The cosine."""
        return self.apply("Cos")

    def floor(self) -> Number:
        """The largest integer that is not above."""
        return self.apply("Floor")

    def power_series(self, *coefficients: float) -> Number:
        """c₀ + c₁x + c₂x² + …"""
        total = self.like(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = total * self + coefficient
        return total


def number(g: Builder, x: Operand) -> Number:
    """An operand of a function whose result has single precision or less, so that the formula has digits to spare."""
    if g.out.dtype == torch.float64:
        raise Unsupported("no formula that is exact in double precision")
    return Number(g, g.cast(x, torch.float64))


def repeated(
    rounds: ir.Value, start: Sequence[Number], step: Callable[[Number, Sequence[Number]], Sequence[Number]]
) -> list[Number]:
    """What is carried after so many rounds; each takes its number, from zero on, and what the last one gave."""
    g = start[0].g

    def once(count: ir.Value, given: Sequence[ir.Value]) -> list[ir.Value]:
        return [y.value for y in step(Number(g, g.cast(count, torch.float64)), [Number(g, x) for x in given])]

    return [Number(g, y) for y in looped(g, rounds, [x.value for x in start], once)]


def looped(
    g: Builder,
    rounds: ir.Value,
    start: Sequence[ir.Value],
    step: Callable[[ir.Value, Sequence[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """As `repeated`, for tensors of any dtype, which each round keeps, and the sizes too."""
    with g.body() as nodes:
        count, again = (_carried(g, dtype, ()) for dtype in (ir.DataType.INT64, ir.DataType.BOOL))
        given = [_carried(g, _dtype(x), g.dims(x)) for x in start]
        after = [g.shaped(y, g.dims(x)) for y, x in zip(step(count, given), start, strict=True)]
        results = [g.shaped(g.Identity(x), g.dims(x)) for x in (again, *after)]
        body = ir.Graph([count, again, *given], results, nodes=nodes, name=g.fresh("body"))
    made = g.several("Loop", len(start), [rounds, None, *start], body=body)
    for y, x in zip(made, start, strict=True):
        y.type = ir.TensorType(_dtype(x))
        g.shaped(y, g.dims(x))
    return list(made)


def _dtype(x: ir.Value) -> ir.DataType:
    assert x.dtype is not None, x
    return x.dtype


def _carried(g: Builder, dtype: ir.DataType, dims: Dims) -> ir.Value:
    return g.shaped(ir.Value(name=g.fresh("given"), type=ir.TensorType(dtype)), dims)


@dataclass(frozen=True, eq=False)
class Curve:
    """A smooth function over an interval, as many short polynomials that meet it at Chebyshev's points.

    The function is computed by torch, in double precision, when it is first needed: there are no coefficients to keep.
    Beyond the interval it has the value at the end.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    low: float
    high: float

    @cached_property
    def coefficients(self) -> np.ndarray:
        """A row for each power, the highest first, and a column for each piece."""
        points = (1 + np.cos(np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))) / 2
        places = self.low + (np.arange(_PIECES)[:, None] + points) * ((self.high - self.low) / _PIECES)
        values = self.function(torch.from_numpy(places)).numpy()
        return np.linalg.solve(np.vander(points), values.T)

    def __call__(self, x: Number) -> Number:
        """The function of each element."""
        g = x.g
        place = (x.at_least(self.low).at_most(self.high) - self.low) * (_PIECES / (self.high - self.low))
        piece = place.where(g.Not(g.IsNaN(place.value)), 0).at_most(_PIECES - 1).floor()
        index, rest = g.cast(piece.value, torch.int64), place - piece
        terms = [Number(g, g.Gather(g.constant(row), index)) for row in np.ascontiguousarray(self.coefficients)]
        total = terms[0]
        for term in terms[1:]:
            g.shaped(term.value, g.dims(x.value))
            total = total * rest + term
        return total
