"""Guards of a trace on symbolic sizes, as conditions on the sizes of a call."""

from __future__ import annotations

import ast
import functools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch.utils._sympy.functions import Mod, PythonMod

from sardonyx.errors import CaptureError
from sardonyx.sizes import Dim, allow_zeros, dims_of, environment_of, expression_of, python_of, size_at
from sardonyx.telemetry.source import source_of


@contextmanager
def record_specializations() -> Iterator[dict[sympy.Symbol, str]]:
    """While active, record the user's line for each symbolic size that becomes a constant.

    torch records only the innermost line, which is often its own.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes a while to import

    lines: dict[sympy.Symbol, str] = {}
    own = ShapeEnv._set_replacement

    def record(self: ShapeEnv, symbol: sympy.Symbol, value: sympy.Expr, message: str) -> None:
        if value.is_number:
            lines.setdefault(symbol, innermost_user_line(traceback.extract_stack()) or "")
        own(self, symbol, value, message)

    with mock.patch.object(ShapeEnv, "_set_replacement", record):
        yield lines


@contextmanager
def record_integers() -> Iterator[list[tuple[sympy.Expr, str]]]:
    """While active, record the sizes that code takes for a Python integer, as equations with the user's lines.

    `torch.linspace(0, 1, x.shape[0] ** 2)` has as many steps as in the example. torch solves such an equation where it
    can, which makes the size a constant; it guards the others at a line of its own.
    """
    from torch.fx.experimental.sym_node import SymNode

    equations: list[tuple[sympy.Expr, str]] = []
    own = SymNode.guard_int

    def record(self: SymNode, file: str, line: int) -> int:
        expr, value = self.expr, own(self, file, line)
        if expr.free_symbols:
            where = innermost_user_line(traceback.extract_stack()) or ""
            equations.append((sympy.Eq(expr, value, evaluate=False), where))
        return value

    with mock.patch.object(SymNode, "guard_int", record):
        yield equations


@contextmanager
def record_small_sizes() -> Iterator[list[tuple[sympy.Expr, str]]]:
    """While active, record decisions for which torch takes a dynamic size for two or more, with the user's lines.

    It does so without a guard, in branches of the model's code and in slices; sympy alone decides that a size is not
    zero, as torch's symbols are positive. What torch's own code decides otherwise, such as how it broadcasts, makes no
    difference to the operators of the graph.
    """
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    decided: list[tuple[sympy.Expr, str]] = []
    own = ShapeEnv._maybe_evaluate_static

    @functools.wraps(own)  # torch clears the cache of the function
    def record(self: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        value = own(self, expr, *args, **kwargs)
        if value in (sympy.true, sympy.false) and expr.free_symbols and _is_models_decision(sys._getframe(1)):
            line = innermost_user_line(traceback.extract_stack()) or ""
            decided.append((expr if value else sympy.Not(expr), line))
        return value

    comparisons: dict[str, Any] = {
        name: _recording(getattr(SymNode, name), relation, decided) for name, relation in _COMPARISONS.items()
    }
    with mock.patch.object(ShapeEnv, "_maybe_evaluate_static", record), mock.patch.multiple(SymNode, **comparisons):
        yield decided


_COMPARISONS = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}


def _recording(own: Callable[..., Any], relation: Any, decided: list[tuple[sympy.Expr, str]]) -> Callable[..., Any]:
    """Return a comparison that records what sympy decides of symbolic sizes in the model's code."""

    def compare(left: Any, right: Any) -> Any:
        result = own(left, right)
        if result.expr in (sympy.true, sympy.false) and (left.expr.free_symbols or right.expr.free_symbols):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename in _SYMBOLIC_INTEGERS:
                frame = frame.f_back
            if not frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
                unevaluated = relation(left.expr, right.expr, evaluate=False)
                line = innermost_user_line(traceback.extract_stack(frame)) or ""
                decided.append((unevaluated if result.expr else unevaluated.negated, line))
        return result

    return compare


def _is_models_decision(frame: FrameType | None) -> bool:
    """Whether a slice, or code that is not torch's, is evaluating a condition."""
    for _ in range(_FRAMES):
        if frame is None or frame.f_code.co_name == "_compute_slice_index":
            return frame is not None
        caller = frame.f_back
        if frame.f_code.co_name == "__bool__" and frame.f_code.co_filename == torch.__file__:
            return caller is not None and not caller.f_code.co_filename.startswith(_LIBRARY_FOLDERS)
        frame = caller
    return False


_FRAMES = 16
"""Frames of torch between a decision and its evaluation, at most."""
_SYMBOLIC_INTEGERS = (torch.__file__, str(Path(torch.__file__).parent / "fx" / "experimental" / "sym_node.py"))
"""Where the operators of SymInt are."""
_LIBRARY_FOLDERS = tuple(str(Path(module).parent) for module in (torch.__file__, __file__))


_NATIVE_CALL = f"{torch._ops.__file__}:"
"""Where a guard of torch's C++ code seems to come from, as `tensor_split` decides which parts are longer."""


def innermost_user_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """Return the innermost line that is neither torch's nor ours."""
    for frame in reversed(frames):
        if not frame.filename.startswith((*_LIBRARY_FOLDERS, "<")):
            return frame_text(frame)
    return None


def location_text(location: Any) -> str:
    """Format a source location recorded by torch."""
    frame = location.maybe_user_loc or location.framework_loc
    return frame_text(frame) if isinstance(frame, traceback.FrameSummary) else str(frame or "")


def frame_text(frame: traceback.FrameSummary) -> str:
    """Format a line of code for an error."""
    return f"{frame.filename}:{frame.lineno} in {frame.name}, code: {frame.line}"


@dataclass(frozen=True)
class Condition:
    """A guard: the traced graph is valid for calls that satisfy it."""

    text: str
    holds: Callable[[Sequence[int]], bool]
    """Whether the sizes of all arguments satisfy it."""
    where: str = ""

    def check(self, sizes: Sequence[int]) -> None:
        """Raise ValueError if the sizes do not satisfy it."""
        if not self.holds(sizes):
            raise ValueError(f"the model was exported for calls with {self.text}" + self._location())

    def _location(self) -> str:
        return f", which was decided at {self.where}" if self.where else ""


def assumptions(
    graph: torch.fx.GraphModule, equations: Sequence[tuple[sympy.Expr, str]] = ()
) -> Iterator[tuple[sympy.Expr, str]]:
    """Yield the conditions that a traced graph relies on, each with the line that caused it.

    They are the equations that `record_integers` found, torch's guards, the assertions among the nodes, and that no
    size is one which `squeeze` left in place: torch traces dynamic sizes as two or more, and has no guard for it.
    """
    environment = environment_of(node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    if environment is not None:
        yield from _guards(environment, equations)
    asserts = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    for node in asserts:
        value = node.args[0].meta.get("val")
        if isinstance(value, torch.SymBool):
            yield expression_of(value), ""
    for node in graph.graph.nodes:
        if node.target in _SQUEEZES:
            yield from ((sympy.Ne(dim, 1), source_of(node)) for dim in _unsqueezed_dims(node))


def _guards(environment: Any, equations: Sequence[tuple[sympy.Expr, str]]) -> Iterator[tuple[sympy.Expr, str]]:
    lines: dict[sympy.Expr, str] = {}
    for expr, line in equations:
        lines.setdefault(allow_zeros(environment.replace(expr), environment), line)
    for guard in environment.guards:
        expr, line = allow_zeros(environment.replace(guard.expr), environment), location_text(guard.sloc)
        # torch's Python code guards how it computes a view, which need not hold for an empty tensor
        if not line.startswith(_LIBRARY_FOLDERS) or (line.startswith(_NATIVE_CALL) and expr.has(Mod, PythonMod)):
            lines.setdefault(expr, line)
    yield from lines.items()


_SQUEEZES = frozenset({torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims})


def _unsqueezed_dims(node: torch.fx.Node) -> list[sympy.Expr]:
    """Return the symbolic sizes that a squeeze would have removed if they were one."""
    source: Any
    axes: Any
    source, *axes = node.args
    dims = dims_of(source.meta["val"])
    chosen = range(len(dims)) if not axes else axes[0] if isinstance(axes[0], (list, tuple)) else axes
    return [dims[axis] for axis in chosen if dims and not isinstance(dims[axis], int)]


def condition_function(expr: sympy.Expr, places: Mapping[sympy.Symbol, int]) -> Callable[[Sequence[int]], bool] | None:
    """Compile a condition to a function of the sizes at these places; None if constant or of anything else."""
    if expr in (sympy.true, sympy.false) or not expr.free_symbols or expr.free_symbols - set(places):
        return None
    read = {symbol: size_at(place) for symbol, place in places.items()}
    try:
        return function_of_sizes(python_of(expr, read))
    except ValueError:  # more than integer arithmetic
        return None


def sizes_or_number(value: Any) -> Sequence[Any]:
    """Return the shape of a tensor, or a number as a tuple: the values that conditions are about."""
    return value.shape if isinstance(value, torch.Tensor) else (value,)


class SizeExpressions:
    """Prints symbolic sizes of a trace as Python expressions of a call's `sizes`."""

    def __init__(self, dims: Sequence[Dim], environment: Any) -> None:
        self._dims, self._environment = dims, environment
        self._read: dict[sympy.Symbol, sympy.Symbol] = {}
        for place, dim in enumerate(dims):
            if isinstance(dim, sympy.Symbol):
                self._read.setdefault(dim, size_at(place))
        self.is_dynamic = bool(self._read)

    def condition(self) -> str:
        """Return the condition that every size satisfies the guards of the trace."""
        terms = [f"sizes[{place}] == {self._text(dim)}" for place, dim in enumerate(self._dims)]
        return " and ".join([*terms, *self._ranges(), *self._guards()]) or "True"

    def tuple_of(self, wanted: Sequence[Dim]) -> str:
        """Return a tuple of these sizes."""
        return "(" + "".join(f"{self._text(dim)}, " for dim in wanted) + ")"

    def _text(self, dim: Any) -> str:
        if isinstance(dim, int):
            return str(dim)
        unknown = dim.free_symbols - set(self._read)
        if unknown:
            raise CaptureError(f"the size {dim} in the model cannot be computed from the sizes of its arguments")
        return f"({python_of(dim, self._read)})"

    def _ranges(self) -> list[str]:
        terms = []
        for symbol, read in self._read.items():
            bounds = self._environment.var_to_range[symbol]
            terms += [f"{read} >= {int(bounds.lower)}"] if bounds.lower.is_Integer else []
            terms += [f"{read} <= {int(bounds.upper)}"] if bounds.upper.is_Integer else []
        return terms

    def _guards(self) -> list[str]:
        """Return the guards of the trace, with equal sizes replaced by one symbol."""
        if self._environment is None:
            return []
        exprs = (self._environment.replace(guard.expr) for guard in self._environment.guards)
        return [self._text(expr) for expr in exprs if expr is not sympy.true and expr != True]  # noqa: E712  # sympy's


def function_of_sizes(expression: str) -> Callable[[Sequence[int]], Any]:
    """Compile a Python expression of a call's `sizes` to a function; only integer arithmetic is allowed.

    >>> function_of_sizes("sizes[0] == 2*sizes[1] and max(sizes[1], 3) < 9")((8, 4))
    True
    >>> function_of_sizes("open('file')")
    Traceback (most recent call last):
    ValueError: open is not allowed in an expression of sizes
    """
    for node in ast.walk(ast.parse(expression, mode="eval")):
        if not isinstance(node, _ARITHMETIC):
            raise ValueError(f"{type(node).__name__} is not arithmetic")
        if isinstance(node, ast.Name) and node.id not in ("sizes", *_FUNCTIONS):
            raise ValueError(f"{node.id} is not allowed in an expression of sizes")
        if isinstance(node, ast.Constant) and not isinstance(node.value, int):
            raise ValueError(f"{node.value!r} is not an integer")
    function: Callable[[Sequence[int]], Any] = eval(f"lambda sizes: {expression}", {"__builtins__": {}, **_FUNCTIONS})
    return function


_FUNCTIONS = {"max": max, "min": min, "abs": abs}
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Tuple, ast.Call),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
