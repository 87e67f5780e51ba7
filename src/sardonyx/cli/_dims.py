"""Evaluate arithmetic in the names of sizes, such as `2*batch + 1`, without executing code from a file."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

from sardonyx.errors import OptionError

Number: TypeAlias = int | Fraction

_LONGEST = 256
"""Characters up to which a name is parsed: longer ones could exhaust the parser's stack."""
_LARGEST = 2**63
_LARGEST_EXPONENT = 64


class DimExpression:
    """A size given by text: integer arithmetic over names, or else a single name.

    >>> sorted(DimExpression("2*batch + tokens//3").names)
    ['batch', 'tokens']
    >>> DimExpression("2*batch + tokens//3").value({"batch": 4, "tokens": 7})
    10
    >>> DimExpression("open('file')").value({})
    1
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = _parse(text)
        names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)} if self._tree else {text}
        self.names = frozenset(names - set(_FUNCTIONS) or {text})

    def value(self, sizes: Mapping[str, int]) -> int:
        """Evaluate the size; names without a value are 1."""
        if self._tree is None:
            return sizes.get(self.text, 1)
        try:
            return int(_value(self._tree, sizes))
        except (ArithmeticError, ValueError) as error:
            raise OptionError(
                f"the size {self.text!r} cannot be computed: {error}", hint="set it with --size"
            ) from error


def _parse(text: str) -> ast.expr | None:
    """Parse an arithmetic expression; None if it is something else, or too long."""
    if len(text) > _LONGEST:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return tree if _is_arithmetic(tree) else None


def _is_arithmetic(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return type(node.value) is int
        case ast.Name():
            return node.id not in _FUNCTIONS
        case ast.UnaryOp():
            return type(node.op) in _UNARY and _is_arithmetic(node.operand)
        case ast.BinOp():
            return type(node.op) in _BINARY and _is_arithmetic(node.left) and _is_arithmetic(node.right)
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in _FUNCTIONS and bool(node.args) and all(map(_is_arithmetic, node.args))
    return False


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Number:
    result: Number = 1
    match node:
        case ast.Constant():
            result = int(str(node.value))
        case ast.Name():
            result = sizes.get(node.id, 1)
        case ast.UnaryOp():
            result = _UNARY[type(node.op)](_value(node.operand, sizes))
        case ast.BinOp():
            result = _BINARY[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
        case ast.Call(func=ast.Name(id=name)):
            result = _call_function(name, [_value(x, sizes) for x in node.args])
    if not -_LARGEST <= result <= _LARGEST:
        raise OverflowError("it is too large")
    return result


def _call_function(name: str, args: list[Number]) -> Number:
    try:
        return _FUNCTIONS[name](*args)
    except TypeError as error:
        raise ValueError(f"{name} takes another number of arguments") from error


def _power(base: Number, exponent: Number) -> Number:
    if not isinstance(exponent, int) or not 0 <= exponent <= _LARGEST_EXPONENT:
        raise ValueError(f"its exponent is not an integer from 0 to {_LARGEST_EXPONENT}")
    return base**exponent


def _divide(a: Number, b: Number) -> Number:
    quotient = Fraction(a) / Fraction(b)
    return quotient.numerator if quotient.denominator == 1 else quotient


_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: _divide,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "floor": math.floor,
    "ceil": math.ceil,
    "ceiling": math.ceil,
    "abs": abs,
    "Abs": abs,
    "max": lambda *args: max(args),
    "Max": lambda *args: max(args),
    "min": lambda *args: min(args),
    "Min": lambda *args: min(args),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "IntTrueDiv": _divide,
}
"""Functions in the sizes that sympy and torch print."""
