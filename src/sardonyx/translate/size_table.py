"""Symbolic sizes in a graph: int64 values computed from the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, Dims, dim_of, may_be_zero

if TYPE_CHECKING:
    from sardonyx.translate.builder import Builder


class SizeTable:
    """Stores which value each symbol can be read from, and computes expressions of symbols, each once."""

    def __init__(self, g: Builder) -> None:
        self._g = g
        self._sources: dict[sympy.Symbol, tuple[ir.Value, int | None]] = {}
        self._multiples: dict[sympy.Symbol, tuple[ir.Value, int, int]] = {}
        self._computed: dict[sympy.Expr, tuple[ir.Value, int]] = {}
        self._values: dict[sympy.Expr, ir.Value] = {}
        self._vectors: dict[tuple[Dim, ...], ir.Value] = {}
        self._reals: dict[sympy.Expr, ir.Value] = {}

    def learn(self, value: ir.Value, dims: Dims) -> None:
        """Read symbols from the dimensions that are a bare symbol, and from multiples of those read nowhere else.

        Other dimensions are stored as expressions, for those whose symbols cannot be read.
        """
        for axis, dim in enumerate(dims):
            if isinstance(dim, sympy.Symbol):
                self._sources.setdefault(dim, (value, axis))
            elif isinstance(dim, sympy.Expr):
                self._computed.setdefault(dim, (value, axis))
            if isinstance(dim, sympy.Mul):
                factor, symbol = dim.as_coeff_Mul()
                if isinstance(symbol, sympy.Symbol) and factor.is_Integer:
                    self._multiples.setdefault(symbol, (value, axis, int(factor)))

    def learn_input(self, expr: sympy.Expr, value: ir.Value) -> None:
        """Read an integer from a tensor of one element: a symbol that is no tensor's size, or an expression."""
        if isinstance(expr, sympy.Symbol):
            self._sources.setdefault(expr, (value, None))
        else:
            self._values.setdefault(expr, value)

    def learn_real(self, symbol: sympy.Expr, value: ir.Value) -> None:
        """Read a real number from a scalar tensor of doubles."""
        self._reals[symbol] = value

    def is_known_from_inputs(self, expr: sympy.Expr) -> bool:
        """Whether the expression can be read from the graph's inputs alone."""
        known = {symbol: source[0] for symbol, source in self._multiples.items()}
        known |= {symbol: source[0] for symbol, source in self._sources.items()}
        return all(symbol in known and known[symbol].producer() is None for symbol in expr.free_symbols)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Restrict what is learned and computed meanwhile to this context."""
        outer = self._sources, self._multiples, self._computed, self._values, self._vectors, self._reals
        self._sources, self._multiples = self._sources.copy(), self._multiples.copy()
        self._computed = self._computed.copy()
        self._values, self._vectors, self._reals = self._values.copy(), self._vectors.copy(), self._reals.copy()
        try:
            yield
        finally:
            self._sources, self._multiples, self._computed, self._values, self._vectors, self._reals = outer

    def bind(self, symbol: sympy.Symbol, value: ir.Value, axis: int | None = None) -> None:
        """Define a symbol as a dimension of the value, or as the integer that it contains."""
        self._sources[symbol] = (value, axis)
        self._values = {expr: known for expr, known in self._values.items() if symbol not in expr.free_symbols}
        self._computed = {expr: known for expr, known in self._computed.items() if symbol not in expr.free_symbols}
        self._vectors = {
            dims: known
            for dims, known in self._vectors.items()
            if not any(isinstance(dim, sympy.Expr) and symbol in dim.free_symbols for dim in dims)
        }

    def forget(self, nodes: Sequence[ir.Node]) -> None:
        """Forget values computed by nodes that are no longer in the graph."""
        present = set(map(id, nodes))

        def is_present(value: ir.Value) -> bool:
            producer = value.producer()
            return producer is None or id(producer) in present

        self._values = {expr: value for expr, value in self._values.items() if is_present(value)}
        self._vectors = {dims: value for dims, value in self._vectors.items() if is_present(value)}
        self._reals = {symbol: value for symbol, value in self._reals.items() if is_present(value)}

    def value(self, dim: Dim) -> ir.Value:
        """Return the size as an int64 tensor of shape [1]."""
        if isinstance(dim, int):
            return self._g.ints([dim])
        if dim not in self._values:
            self._values[dim] = self._g.shaped(self._compute(dim), (1,))
        return self._values[dim]

    def real(self, expr: sympy.Expr) -> ir.Value:
        """Return a number computed from sizes and numbers as a scalar double, as in torch."""
        if expr in self._reals:
            return self._reals[expr]
        if expr.is_number:
            return self._g.scalar(float(expr), torch.float64)
        if expr.is_integer:
            return self._g.scalar(dim_of(expr), torch.float64)
        for kind, op_type in _REALS.items():
            if isinstance(expr, kind):
                return _fold(op_type)(self._g, [self.real(arg) for arg in expr.args], expr)
        if isinstance(expr, torch_sympy.ToFloat):
            return self.real(expr.args[0])
        raise Unsupported(f"a number computed as {expr} has no ONNX form")

    def condition(self, expr: Any) -> ir.Value:
        """Return a relation between sizes as a boolean tensor of shape [1]."""
        if expr in (sympy.true, sympy.false):
            return self._g.constant(np.array([bool(expr)]))
        for kind, op_type in _RELATIONS.items():
            if isinstance(expr, kind) and all(side.is_integer for side in expr.args):
                return self._g.node(op_type, [self.value(dim_of(side)) for side in expr.args])
        if isinstance(expr, sympy.Ne):
            return self._g.Not(self.condition(sympy.Eq(*expr.args)))
        if isinstance(expr, sympy.Not):
            return self._g.Not(self.condition(expr.args[0]))
        if isinstance(expr, (sympy.And, sympy.Or)):
            rule = _fold("And" if isinstance(expr, sympy.And) else "Or")
            return rule(self._g, [self.condition(arg) for arg in expr.args], expr)
        raise Unsupported(f"the condition {expr} has no ONNX form")

    def vector(self, dims: Sequence[Dim]) -> ir.Value:
        """Return sizes as a one-dimensional int64 tensor; adjacent dimensions of one tensor are read together."""
        dims = tuple(dims)
        if all(isinstance(dim, int) for dim in dims):
            return self._g.ints([int(dim) for dim in dims])
        if len(dims) == 1:
            return self.value(dims[0])
        if dims not in self._vectors:
            pieces = self._pieces(dims)
            joined = pieces[0] if len(pieces) == 1 else self._g.Concat(*pieces, axis=0)
            self._vectors[dims] = self._g.shaped(joined, (len(dims),))
        return self._vectors[dims]

    def _pieces(self, dims: Dims) -> list[ir.Value]:
        pieces: list[ir.Value] = []
        at = 0
        while at < len(dims):
            run = self._run_length(dims, at)
            if run > 1:
                value, axis = self._sources[dims[at]]
                assert axis is not None
                pieces.append(self._g.Shape(value, start=axis, end=axis + run))
            elif isinstance(dims[at], int):
                run = next((i for i, d in enumerate(dims[at:]) if not isinstance(d, int)), len(dims) - at)
                pieces.append(self._g.ints([int(d) for d in dims[at : at + run]]))
            else:
                pieces.append(self.value(dims[at]))
            at += run
        return pieces

    def _run_length(self, dims: Dims, at: int) -> int:
        source = self._sources.get(dims[at]) if isinstance(dims[at], sympy.Symbol) else None
        if source is None or source[1] is None:
            return 1
        run = 1
        while at + run < len(dims) and self._sources.get(dims[at + run]) == (source[0], source[1] + run):
            run += 1
        return run

    def reshape_target(self, x: ir.Value, dims: Dims) -> tuple[ir.Value, bool]:
        """Return sizes for a Reshape of `x`, and whether a zero among them is a size rather than "keep".

        0 (keep) and −1 (the rest) save arithmetic. −1 is ambiguous if another size is zero.
        """
        symbolic = [axis for axis, dim in enumerate(dims) if not isinstance(dim, int)]
        old: Dims = x.meta.get("dims") or ()
        unchanged = [axis for axis in symbolic if axis < len(old) and old[axis] == dims[axis]]
        rest = [axis for axis in symbolic if axis not in unchanged]
        others = [dim for axis, dim in enumerate(dims) if axis not in rest]
        if not symbolic or 0 in dims or len(rest) > 1 or (rest and any(map(may_be_zero, others))):
            return self.vector(dims), any(map(may_be_zero, dims))
        short = [0 if axis in unchanged else -1 if axis in rest else int(dims[axis]) for axis in range(len(dims))]
        return self._g.ints(short), False

    def _compute(self, expr: sympy.Expr) -> ir.Value:
        if isinstance(expr, sympy.Symbol):
            return self._read(expr)
        if expr in self._computed and not self._is_known(expr):
            value, axis = self._computed[expr]
            return self._g.Shape(value, start=axis, end=axis + 1)
        if isinstance(expr, sympy.floor):  # from Python's // on sympy numbers
            return self.value(dim_of(torch_sympy.FloorDiv(*expr.args[0].as_numer_denom())))
        if isinstance(expr, torch_sympy.TruncToInt):
            return self._g.reshape(self._g.cast(self.real(expr.args[0]), torch.int64), (1,))
        for kind, rule in _EXPRESSIONS.items():
            if isinstance(expr, kind):
                return rule(self._g, [self.value(dim_of(arg)) for arg in expr.args], expr)
        raise Unsupported(f"a size computed as {expr} has no ONNX form")

    def _is_known(self, expr: sympy.Expr) -> bool:
        """Whether every symbol of the expression can be read."""
        return all(symbol in self._sources or symbol in self._multiples for symbol in expr.free_symbols)

    def _read(self, symbol: sympy.Symbol) -> ir.Value:
        if symbol not in self._sources and symbol in self._multiples:
            value, start, factor = self._multiples[symbol]
            return self._g.Div(self._g.Shape(value, start=start, end=start + 1), self._g.ints([factor]))
        if symbol not in self._sources:
            raise Unsupported(f"the size {symbol} is not a dimension of an input")
        value, axis = self._sources[symbol]
        return value if axis is None else self._g.Shape(value, start=axis, end=axis + 1)


def _fold(op_type: str) -> Callable[[Builder, list[ir.Value], sympy.Expr], ir.Value]:
    def rule(g: Builder, args: list[ir.Value], expr: sympy.Expr) -> ir.Value:
        result = args[0]
        for arg in args[1:]:
            result = g.node(op_type, [result, arg])
        return result

    return rule


def _floor_div(g: Builder, args: list[ir.Value], expr: sympy.Expr) -> ir.Value:
    # ONNX's integer Div truncates; floor(a/b) = (a - mod(a, b)) / b, whose Mod has the divisor's sign.
    base, divisor = expr.args
    by = _divisor(g, args[1], divisor)
    if base.is_nonnegative and divisor.is_nonnegative:
        return g.Div(args[0], by)
    return g.Div(g.Sub(args[0], g.Mod(args[0], by)), by)


def _mod(g: Builder, args: list[ir.Value], expr: sympy.Expr) -> ir.Value:
    return g.Mod(args[0], _divisor(g, args[1], expr.args[1]))


def _divisor(g: Builder, value: ir.Value, expr: sympy.Expr) -> ir.Value:
    """Return a size to divide by, with zero replaced: the result is empty then, and engines do not divide by zero."""
    return g.Max(value, g.ints([1])) if expr.is_nonnegative and may_be_zero(dim_of(expr)) else value


def _power(g: Builder, args: list[ir.Value], expr: sympy.Expr) -> ir.Value:
    exponent = expr.args[1]
    if not (exponent.is_Integer and 1 < int(exponent) < 8):
        raise Unsupported(f"a size computed as {expr} has no ONNX form")
    result = args[0]
    for _ in range(int(exponent) - 1):
        result = g.Mul(result, args[0])
    return result


_RELATIONS: dict[Any, str] = {
    sympy.Eq: "Equal",
    sympy.StrictLessThan: "Less",
    sympy.LessThan: "LessOrEqual",
    sympy.StrictGreaterThan: "Greater",
    sympy.GreaterThan: "GreaterOrEqual",
}
_REALS: dict[Any, str] = {
    sympy.Add: "Add",
    sympy.Mul: "Mul",
    torch_sympy.FloatTrueDiv: "Div",
    torch_sympy.IntTrueDiv: "Div",
    torch_sympy.FloatPow: "Pow",
    torch_sympy.OpaqueUnaryFn_sqrt: "Sqrt",
}
_EXPRESSIONS: dict[Any, Callable[[Builder, list[ir.Value], sympy.Expr], ir.Value]] = {
    sympy.Add: _fold("Add"),
    sympy.Mul: _fold("Mul"),
    sympy.Max: _fold("Max"),
    sympy.Min: _fold("Min"),
    torch_sympy.Max: _fold("Max"),
    torch_sympy.Min: _fold("Min"),
    torch_sympy.FloorDiv: _floor_div,
    torch_sympy.Mod: _mod,
    torch_sympy.PythonMod: _mod,
    sympy.Mod: _mod,
    sympy.Pow: _power,
    torch_sympy.PowByNatural: _power,
}
