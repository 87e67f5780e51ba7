"""C++ expressions: types, numbers, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy
from torch.utils._sympy import functions as torch_sympy

from sardonyx.native.region import CannotLower
from sardonyx.native.values import Number
from sardonyx.sizes import Dim
from sardonyx.toolchain.literals import identifier

TYPES: Mapping[ir.DataType, str] = {
    ir.DataType.FLOAT: "float",
    ir.DataType.DOUBLE: "double",
    ir.DataType.FLOAT16: "half",
    ir.DataType.BFLOAT16: "bfloat",
    ir.DataType.BOOL: "boolean",
    **{ir.DataType[f"{sign}INT{bits}"]: f"{sign.lower()}int{bits}_t" for sign in ("", "U") for bits in (8, 16, 32, 64)},
}
"""Element types in memory."""
_COMPUTED = {"half": "float", "bfloat": "float", "boolean": "int32_t"}


def computed_type(dtype: ir.DataType) -> str:
    """Return the type that an element is computed in."""
    return _COMPUTED.get(TYPES[dtype], TYPES[dtype])


def number_code(number: Number) -> str:
    """Return a number in the type it is computed in."""
    kind, value = computed_type(number.dtype), number.value
    if isinstance(value, sympy.Expr):
        return f"static_cast<{kind}>({code_of(value)})"
    if number.dtype == ir.DataType.BOOL:
        return "-1" if value else "0"
    if isinstance(value, float) and not math.isfinite(value):
        limits = f"std::numeric_limits<{kind}>"
        text = f"{limits}::quiet_NaN()" if math.isnan(value) else f"{limits}::infinity()"
        return f"-{text}" if value < 0 else text
    if kind in ("float", "double"):
        return f"static_cast<{kind}>({float(value)!r})"
    if value == -(2**63):
        return "std::numeric_limits<int64_t>::min()"
    return f"static_cast<{kind}>({int(value)}{'u' if kind.startswith('u') else ''}{'ll' if '64' in kind else ''})"


def cast_code(code: str, before: ir.DataType, after: ir.DataType) -> str:
    """Return an expression cast to another type."""
    if before == ir.DataType.BOOL:
        return f"from_mask<{computed_type(after)}>({code})"
    if after == ir.DataType.BOOL:
        return f"to_mask({code})"
    converted = f"convert<{computed_type(after)}>({code})"
    if before.is_integer() and after.is_floating_point():
        converted = f"positive_zero({converted})"
    return f"through<{TYPES[after]}>({converted})" if TYPES[after] in ("half", "bfloat") else converted


def code_of(dim: Dim) -> str:
    """Return a size in C++."""
    if isinstance(dim, (int, sympy.Integer)):
        return f"{int(dim)}"
    if isinstance(dim, sympy.Symbol):
        return symbol_name(dim)
    if isinstance(dim, (sympy.Add, sympy.Mul)):
        sign = " + " if isinstance(dim, sympy.Add) else " * "
        return "(" + sign.join(code_of(arg) for arg in dim.args) + ")"
    if isinstance(dim, sympy.Pow) and dim.exp.is_Integer and 0 < int(dim.exp) < 16:
        return "(" + " * ".join([code_of(dim.base)] * int(dim.exp)) + ")"
    for kind, function in _SIZE_FUNCTIONS.items():
        if isinstance(dim, kind):
            return _nest_calls(function, [code_of(arg) for arg in dim.args])
    raise CannotLower(f"the size {dim} has no form in C++")


_SIZE_FUNCTIONS: Mapping[Any, str] = {
    sympy.Max: "std::max<int64_t>",
    sympy.Min: "std::min<int64_t>",
    torch_sympy.Max: "std::max<int64_t>",
    torch_sympy.Min: "std::min<int64_t>",
    torch_sympy.FloorDiv: "floor_divided",
    torch_sympy.Mod: "floor_modulo",
    torch_sympy.PythonMod: "floor_modulo",
    sympy.Mod: "floor_modulo",
}


def _nest_calls(function: str, args: Sequence[str]) -> str:
    result = args[0]
    for arg in args[1:]:
        result = f"{function}({result}, {arg})"
    return result


def symbol_name(symbol: sympy.Basic) -> str:
    """Return the unique C++ name of a symbol."""
    return identifier(str(symbol))
