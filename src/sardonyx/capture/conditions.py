"""What a trace assumed of symbolic sizes, as conditions on the sizes of a call."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import sympy
import torch

from sardonyx.errors import CaptureError
from sardonyx.sizes import Dim, python_of, size_at


def environment_of(values: Iterable[Any]) -> Any:
    """Torch's record of what was assumed of symbolic sizes; None if nothing is symbolic."""
    for value in values:
        for size in (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
            if isinstance(size, torch.SymInt):
                return size.node.shape_env
    return None


@contextmanager
def recording_constants() -> Iterator[dict[sympy.Symbol, str]]:
    """While active, the user's line is recorded for each symbolic size that becomes a constant.

    torch remembers the innermost line alone, which often is its own.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes a while to import

    lines: dict[sympy.Symbol, str] = {}
    own = ShapeEnv._set_replacement

    def record(self: ShapeEnv, symbol: sympy.Symbol, value: sympy.Expr, message: str) -> None:
        if value.is_number:
            lines.setdefault(symbol, innermost_line(traceback.extract_stack()) or "")
        own(self, symbol, value, message)

    with mock.patch.object(ShapeEnv, "_set_replacement", record):
        yield lines


_NOT_THE_USERS = tuple(str(Path(module).parent) for module in (torch.__file__, __file__))


def innermost_line(frames: Sequence[traceback.FrameSummary]) -> str | None:
    """The innermost line that is neither torch's nor ours."""
    for frame in reversed(frames):
        if not frame.filename.startswith((*_NOT_THE_USERS, "<")):
            return frame_text(frame)
    return None


def location_text(location: Any) -> str:
    """A place in the code that torch remembers."""
    found = location.maybe_user_loc or location.framework_loc
    return frame_text(found) if isinstance(found, traceback.FrameSummary) else str(found or "")


def frame_text(frame: traceback.FrameSummary) -> str:
    """A line of code, as errors show it."""
    return f"{frame.filename}:{frame.lineno} in {frame.name}, code: {frame.line}"


@dataclass(frozen=True)
class Condition:
    """Something that a trace assumed of a call: the call stands for those others of which it holds too."""

    text: str
    holds: Callable[[Sequence[int]], bool]
    """Whether it holds, by the sizes of all arguments."""
    where: str = ""

    def check(self, sizes: Sequence[int]) -> None:
        """Raise an error if it does not hold."""
        if not self.holds(sizes):
            raise ValueError(f"the model was exported for calls of which {self.text} holds" + self._at())

    def _at(self) -> str:
        return f", which was decided at {self.where}" if self.where else ""


def assumptions(graph: torch.fx.GraphModule) -> Iterator[tuple[sympy.Expr, str]]:
    """What was assumed while a graph was traced, and where in the code; then what its nodes assert of numbers."""
    environment = environment_of(node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder"))
    for guard in environment.guards if environment is not None else ():
        yield environment.replace(guard.expr), location_text(guard.sloc)
    asserts = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    for node in asserts:
        value = node.args[0].meta.get("val")
        if isinstance(value, torch.SymBool):
            yield value.node.expr, ""


def function_of(expr: sympy.Expr, places: Mapping[sympy.Symbol, int]) -> Callable[[Sequence[int]], bool] | None:
    """A condition as a function of the sizes at these places; None if it is none of them alone, or always holds."""
    if expr in (sympy.true, sympy.false) or not expr.free_symbols or expr.free_symbols - set(places):
        return None
    read = {symbol: size_at(place) for symbol, place in places.items()}
    try:
        return function_of_sizes(python_of(expr, read))
    except ValueError:  # it computes with more than integers
        return None


def sizes_of(value: Any) -> Sequence[Any]:
    """What of an argument conditions may speak of."""
    return value.shape if isinstance(value, torch.Tensor) else (value,)


class Sizes:
    """The sizes of a trace as Python functions of a call's sizes."""

    def __init__(self, dims: Sequence[Dim], environment: Any) -> None:
        self._dims, self._environment = dims, environment
        self._read: dict[sympy.Symbol, sympy.Symbol] = {}
        for place, dim in enumerate(dims):
            if isinstance(dim, sympy.Symbol):
                self._read.setdefault(dim, size_at(place))
        self.is_dynamic = bool(self._read)

    def condition(self) -> str:
        """That every size is what was assumed of it."""
        terms = [f"sizes[{place}] == {self._text(dim)}" for place, dim in enumerate(self._dims)]
        return " and ".join([*terms, *self._ranges(), *self._guards()]) or "True"

    def tuple_of(self, wanted: Sequence[Dim]) -> str:
        """These expressions."""
        return "(" + "".join(f"{self._text(dim)}, " for dim in wanted) + ")"

    def _text(self, dim: Any) -> str:
        if isinstance(dim, int):
            return str(dim)
        unknown = dim.free_symbols - set(self._read)
        if unknown:
            raise CaptureError(f"a size of the model, {dim}, cannot be told from the sizes of its arguments")
        return f"({python_of(dim, self._read)})"

    def _ranges(self) -> list[str]:
        terms = []
        for symbol, read in self._read.items():
            bounds = self._environment.var_to_range[symbol]
            terms += [f"{read} >= {int(bounds.lower)}"] if bounds.lower.is_Integer else []
            terms += [f"{read} <= {int(bounds.upper)}"] if bounds.upper.is_Integer else []
        return terms

    def _guards(self) -> list[str]:
        """What tracing decided by, with every size that turned out to be another written as that other."""
        if self._environment is None:
            return []
        exprs = (self._environment.replace(guard.expr) for guard in self._environment.guards)
        return [self._text(expr) for expr in exprs if expr is not sympy.true and expr != True]  # noqa: E712  # sympy's


def function_of_sizes(expression: str) -> Callable[[Sequence[int]], Any]:
    """A Python expression of a call's `sizes` as a function; it may compute with integers, and nothing else.

    >>> function_of_sizes("sizes[0] == 2*sizes[1] and max(sizes[1], 3) < 9")((8, 4))
    True
    >>> function_of_sizes("open('file')")
    Traceback (most recent call last):
    ValueError: open is no function of sizes
    """
    for node in ast.walk(ast.parse(expression, mode="eval")):
        if not isinstance(node, _ARITHMETIC):
            raise ValueError(f"{type(node).__name__} is no arithmetic")
        if isinstance(node, ast.Name) and node.id not in ("sizes", *_FUNCTIONS):
            raise ValueError(f"{node.id} is no function of sizes")
        if isinstance(node, ast.Constant) and not isinstance(node.value, int):
            raise ValueError(f"{node.value!r} is no integer")
    made: Callable[[Sequence[int]], Any] = eval(f"lambda sizes: {expression}", {"__builtins__": {}, **_FUNCTIONS})
    return made


_FUNCTIONS = {"max": max, "min": min, "abs": abs}
_ARITHMETIC = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Subscript, ast.Tuple, ast.Call),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)
