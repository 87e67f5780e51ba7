"""Symbolic sizes: integers and sympy expressions of a traced shape, and their values in a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

Dim: TypeAlias = "int | sympy.Expr"
Dims: TypeAlias = tuple[Dim, ...]
Equality: TypeAlias = "Callable[[Dim, Dim], bool]"


def expression_of(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """Return the expression of a symbolic number; see `allow_zeros`."""
    return allow_zeros(number.node.expr, number.node.shape_env)


def allow_zeros(expression: sympy.Expr, environment: Any) -> sympy.Expr:
    """Return the expression with symbols that are positive only if the shape environment's ranges exclude zero.

    torch makes every symbol of a size positive, even if an exported graph also works for a size of zero.
    """
    ranges = environment.var_to_range if environment is not None else {}
    zeros = {
        s: symbol_of(s.name) for s in expression.free_symbols if s.is_positive and s in ranges and ranges[s].lower <= 0
    }
    relaxed: sympy.Expr = expression.xreplace(zeros)
    return relaxed


def environment_of(values: Iterable[Any]) -> Any:
    """Return the ShapeEnv of the symbolic sizes among these values; None if nothing is symbolic."""
    for value in values:
        for size in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


def equality(environment: Any) -> Equality:
    """Return a function that tells whether two sizes are equal in every call that satisfies the guards of a trace."""
    if environment is None:
        return operator.eq
    traced = {symbol_of(symbol.name): symbol for symbol in environment.var_to_range}

    def equal(x: Dim, y: Dim) -> bool:
        sides = [sympy.sympify(dim).xreplace(traced) for dim in (x, y)]
        return x == y or environment._maybe_evaluate_static(sympy.Eq(*sides)) == sympy.true

    return equal


def symbol_of(name: str) -> sympy.Symbol:
    """The symbol of a size that may be zero. Sympy takes two of one name but other assumptions for different ones."""
    return sympy.Symbol(name, integer=True, nonnegative=True)


def may_be_zero(dim: Dim) -> bool:
    """Whether a size can be zero, by the assumptions on its symbols.

    >>> n = symbol_of("n")
    >>> may_be_zero(2 * n), may_be_zero(n + 1), may_be_zero(3)
    (True, False, False)
    """
    return dim == 0 if isinstance(dim, int) else not dim.is_positive


def dim_of(size: Any) -> Dim:
    """Convert an int, SymInt or expression to an int if it is constant, else to an expression."""
    if isinstance(size, torch.SymInt):
        size = expression_of(size)
    if isinstance(size, sympy.Expr):
        return int(size) if size.is_number else size
    return int(size)


def dims_of(tensor: torch.Tensor) -> Dims:
    """Return the sizes of a (fake) tensor."""
    return tuple(map(dim_of, tensor.shape))


# Values in a call


def size_at(place: int) -> sympy.Symbol:
    """The size at that place of a call, as `python_of` prints it."""
    return sympy.Symbol(f"sizes[{place}]", integer=True)


def python_of(expression: sympy.Expr, symbols: Mapping[sympy.Symbol, sympy.Symbol]) -> str:
    """An expression of sizes in Python, with other symbols in the place of its own."""
    text: str = PythonPrinter().doprint(expression.xreplace(symbols))
    return text


def value_of(dim: Dim, values: dict[Any, int]) -> int:
    """The value of a size where those of its symbols are known."""
    if isinstance(dim, int):
        return dim
    known = values.get(dim)
    return known if known is not None else int(sympy_interp(PythonReferenceAnalysis, values, dim))


SizesOfCall: TypeAlias = Callable[[Sequence[Any]], tuple[int, ...]]
"""Computes numbers that depend on sizes from the arguments of a call."""


def sizes_of_call(dims: Dims, graph: torch.fx.GraphModule) -> SizesOfCall:
    """Return a function that computes symbolic sizes; raises KeyError if the arguments do not determine them."""
    if all(isinstance(dim, int) for dim in dims):
        known = tuple(int(dim) for dim in dims)
        return lambda args: known
    dims, places = _with_known_parts(dims, _places(graph))
    symbols = {symbol for dim in dims if not isinstance(dim, int) for symbol in dim.free_symbols}
    needed = {symbol: _reader(symbol, places) for symbol in symbols}

    def read(args: Sequence[Any]) -> tuple[int, ...]:
        values = {symbol: read_symbol(args) for symbol, read_symbol in needed.items()}
        return tuple(value_of(dim, values) for dim in dims)

    return read


_Places: TypeAlias = Mapping[Dim, tuple[int, int | None]]


def _with_known_parts(dims: Dims, places: _Places) -> tuple[Dims, _Places]:
    """Name the sizes of arguments that are parts of these: one of (n + 1) // 2 is known where n is not."""
    parts = [dim for dim in places if not isinstance(dim, int) and not dim.is_Symbol]
    names = {dim: sympy.Symbol(f"part_{number}", integer=True) for number, dim in enumerate(parts)}
    named = tuple(dim if isinstance(dim, int) else dim.xreplace(names) for dim in dims)
    return named, {**places, **{name: places[dim] for dim, name in names.items()}}


def _reader(symbol: sympy.Symbol, places: _Places) -> Callable[[Sequence[Any]], int]:
    """Return a function that reads a symbol from arguments: a size, or what a size such as its square determines."""
    if symbol in places:
        return lambda args: _read(args, *places[symbol])
    for dim, place in places.items():
        solved = _solved(dim, symbol)
        if solved is not None:
            return lambda args: round(solved(_read(args, *place)))
    raise KeyError(symbol)


def _solved(dim: Dim, symbol: sympy.Symbol) -> Callable[[int], float] | None:
    """Return the function of the size that is the symbol; None if there is no formula, or more than one.

    >>> s = sympy.Symbol("s", positive=True, integer=True)
    >>> _solved(s**2, s)(16), _solved(s + sympy.Symbol("t"), s)
    (4.0, None)
    """
    if isinstance(dim, int) or dim.free_symbols != {symbol} or not dim.is_polynomial(symbol):
        return None
    positive, size = sympy.Symbol("positive", positive=True), sympy.Symbol("size", positive=True)
    solutions = sympy.solve(dim.xreplace({symbol: positive}) - size, positive)
    function: Callable[[int], float] | None = (
        sympy.lambdify(size, solutions[0], "math") if len(solutions) == 1 else None
    )
    return function


def _places(graph: torch.fx.GraphModule) -> dict[Dim, tuple[int, int | None]]:
    """Return the position of each symbol: the index of an argument and, for a tensor, the axis."""
    found: dict[Dim, tuple[int, int | None]] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            found.setdefault(dim_of(val), (index, None))
        elif isinstance(val, torch.Tensor):
            for axis, dim in enumerate(dims_of(val)):
                found.setdefault(dim, (index, axis))
    return found


def _read(args: Sequence[Any], index: int, axis: int | None) -> int:
    return int(args[index] if axis is None else args[index].shape[axis])
