"""Declared translations: expressions of ONNX operators over the arguments of a torch operator.

>>> from sardonyx.translate.declared import Mul, Sigmoid
>>> Mul("x", Sigmoid("x"))
Mul('x', Sigmoid('x'))
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, reduce
from typing import Any

import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import DeclarationError, Unsupported
from sardonyx.translate import schemas, table
from sardonyx.translate.builder import Builder
from sardonyx.translate.functional import functional_of, mutated_arguments


class Arg:
    """An argument of the torch operator as an ONNX attribute: `Softmax("self", axis=Arg("dim"))`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Arg({self.name!r})"


class Node:
    """An ONNX operator. Operands are names of arguments, other nodes, and numbers; attributes are values.

    Operands that ONNX needs in one dtype are promoted as in torch, and dtypes that ONNX does not support are cast to
    that of the result.
    """

    def __init__(self, op_type: str, *operands: Any, **attributes: Any) -> None:
        self._op_type, self._operands, self._attributes = op_type, operands, attributes
        _check_node(op_type, operands, attributes)

    def __repr__(self) -> str:
        arguments = [*map(repr, self._operands), *(f"{name}={value!r}" for name, value in self._attributes.items())]
        return f"{self._op_type}({', '.join(arguments)})"

    def names(self) -> set[str]:
        """Return the names of the arguments that it uses."""
        names = {x for x in self._operands if isinstance(x, str)}
        names |= {x.name for x in self._attributes.values() if isinstance(x, Arg)}
        return names.union(*(x.names() for x in self._operands if isinstance(x, Node)))

    def append(self, g: Builder, arguments: Mapping[str, Any]) -> ir.Value:
        """Append it, and the nodes that it needs, to a graph."""
        operands = [self._operand(g, arguments, x) for x in self._operands]
        attributes = {name: arguments[x.name] if isinstance(x, Arg) else x for name, x in self._attributes.items()}
        signature = schemas.signature(self._op_type, g.opset)
        if signature is None:
            raise Unsupported(f"ONNX has no {self._op_type} in opset {g.opset}")
        inputs = self._cast(g, operands, signature)
        return g.node(self._op_type, inputs, dtype=self._result_type(inputs, attributes, signature), **attributes)

    def _result_type(
        self, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], signature: schemas.Signature
    ) -> ir.DataType | None:
        """Return the dtype of the output according to the schema; None for that of the first operand."""
        constraint = signature.of_output(0)
        only = signature.only(constraint)
        if only is not None:
            return ir.DataType[only.removeprefix("tensor(").removesuffix(")").upper()]
        if self._op_type == "ConstantOfShape":
            return ir.tensor(attributes["value"]).dtype if "value" in attributes else ir.DataType.FLOAT
        like = (x for index, x in enumerate(inputs) if x is not None and signature.of_input(index) == constraint)
        return next((x.dtype for x in like), None)

    def _operand(self, g: Builder, arguments: Mapping[str, Any], operand: Any) -> Any:
        if isinstance(operand, Node):
            return operand.append(g, arguments)
        return arguments[operand] if isinstance(operand, str) else operand

    def _cast(self, g: Builder, operands: Sequence[Any], signature: schemas.Signature) -> list[ir.Value | None]:
        """Return the operands as tensors, those of one type constraint in one dtype that ONNX supports."""
        by_constraint: defaultdict[str, list[Any]] = defaultdict(list)
        for index, operand in enumerate(operands):
            if operand is not None:
                by_constraint[signature.of_input(index)].append(operand)
        chosen = {name: self._dtype(g, name, group, signature) for name, group in by_constraint.items()}
        return [None if x is None else g.cast(x, chosen[signature.of_input(i)]) for i, x in enumerate(operands)]

    def _dtype(self, g: Builder, constraint: str, operands: Sequence[Any], signature: schemas.Signature) -> torch.dtype:
        allowed = signature.allowed.get(constraint, frozenset({constraint}))
        promoted = _promote(g, operands)
        able = [dtype for dtype in (promoted, g.out.dtype, torch.int64, torch.bool) if _type_name(dtype) in allowed]
        return able[0] if able else promoted  # legalize inserts casts, or refuses it by name


def _promote(g: Builder, operands: Sequence[Any]) -> torch.dtype:
    if len(operands) == 1:
        return g.dtype(operands[0]) if isinstance(operands[0], ir.Value) else g.result_type(operands[0], operands[0])
    return reduce(torch.promote_types, (g.result_type(operands[0], x) for x in operands[1:]))


@cache
def _type_name(dtype: torch.dtype) -> str:
    return f"tensor({dtypes.to_onnx(dtype).name.lower()})"


class SignatureOnly:
    """An operator whose implementation on the device is the given function, called as torch calls the operator.

    Without a function, the device must have an implementation already, or declaring it is an error.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        if function is not None and not callable(function):
            raise DeclarationError(f"SignatureOnly takes a function, not {function!r}")
        self.function = function

    def __repr__(self) -> str:
        return f"SignatureOnly({'' if self.function is None else self.function!r})"


def __getattr__(name: str) -> Callable[..., Node]:
    if name not in _operators():
        raise AttributeError(f"ONNX has no operator {name!r}{_suggestion(name, _operators())}")
    return partial(Node, name)


@cache
def _operators() -> Mapping[str, onnx.defs.OpSchema]:
    """Return the newest schemas of ONNX's own operators, by name."""
    return {
        schema.name: schema for schema in onnx.defs.get_all_schemas() if not schema.domain and not schema.deprecated
    }


def _check_node(op_type: str, operands: Sequence[Any], attributes: Mapping[str, Any]) -> None:
    schema = _operators().get(op_type)
    if schema is None:
        raise DeclarationError(f"ONNX has no operator {op_type!r}{_suggestion(op_type, _operators())}")
    for name in attributes:
        if name not in schema.attributes:
            known = ", ".join(sorted(schema.attributes)) or "none"
            raise DeclarationError(
                f"ONNX's {op_type} has no attribute {name!r}{_suggestion(name, schema.attributes)}",
                hint=f"its attributes: {known}",
            )
    if not schema.min_input <= len(operands) <= schema.max_input:
        takes = ", ".join(x.name for x in schema.inputs)
        raise DeclarationError(f"ONNX's {op_type} takes {takes}, got {len(operands)} operands")
    if schema.min_output > 1:
        raise DeclarationError(f"ONNX's {op_type} returns {schema.min_output} tensors; a declaration returns one")
    _check_values(op_type, operands, attributes, schema)


def _check_values(
    op_type: str, operands: Sequence[Any], attributes: Mapping[str, Any], schema: onnx.defs.OpSchema
) -> None:
    missing = [name for name, attribute in schema.attributes.items() if attribute.required and name not in attributes]
    if missing:
        raise DeclarationError(f"ONNX's {op_type} needs the attribute {missing[0]!r}")
    for name, value in attributes.items():
        expected = _VALUES.get(schema.attributes[name].type)
        if expected is not None and not isinstance(value, (Arg, *expected)):
            raise DeclarationError(f"the attribute {name!r} of ONNX's {op_type} is {value!r}, of another type")
    for operand in operands:
        if not isinstance(operand, (str, Node, int, float, torch.Tensor, type(None))):
            raise DeclarationError(
                f"an operand of ONNX's {op_type} is {operand!r}",
                hint="operands are names of arguments, other nodes, and numbers",
            )


_VALUES: Mapping[Any, tuple[type, ...]] = {
    onnx.defs.OpSchema.AttrType.FLOAT: (int, float),
    onnx.defs.OpSchema.AttrType.INT: (int, ir.DataType),
    onnx.defs.OpSchema.AttrType.STRING: (str, bytes),
    onnx.defs.OpSchema.AttrType.FLOATS: (list, tuple),
    onnx.defs.OpSchema.AttrType.INTS: (list, tuple),
    onnx.defs.OpSchema.AttrType.STRINGS: (list, tuple),
}
"""The types of values of attributes, as far as they are checked."""


def _suggestion(name: str, known: Iterable[str]) -> str:
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


DECLARED: dict[str, Node] = {}
"""Declared operators, by qualified name."""


def declare(operators: Mapping[str, Node], *, replace: bool = False) -> None:
    """Add translations of operators, by qualified name, to the table; `replace` allows existing ones."""
    translations = {name: translation(name, node) for name, node in operators.items()}
    for name, translate in translations.items():
        table.register(name, translate, replace=replace)
    DECLARED.update(operators)


def translation(name: str, node: Node) -> table.Translation:
    """Return a translation for the table. Raise if the node uses arguments that torch's operator does not have."""
    operator = table.operator_of(name)
    arguments = operator._schema.arguments
    _refuse_writing(operator)
    unknown = node.names() - {a.name for a in arguments}
    if unknown:
        takes = ", ".join(a.name for a in arguments)
        near = _suggestion(min(unknown), [a.name for a in arguments])
        raise DeclarationError(f"{name} takes {takes}, not {', '.join(sorted(unknown))}{near}")
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def translate(g: Builder, *args: Any, **kwargs: Any) -> ir.Value:
        values = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        return g.cast(node.append(g, values), g.out.dtype)

    return translate


def _refuse_writing(operator: Any) -> None:
    """Raise for an operator that writes its result: those follow from the one that returns it."""
    names = mutated_arguments(operator)
    if names:
        functional = functional_of(operator)
        instead = "the operator that returns the value" if functional is None else repr(functional.name())
        raise DeclarationError(
            f"{operator.name()} writes to {', '.join(names)}, but a declaration defines what an operator returns",
            hint=f"declare {instead}: its in-place and out= variants follow from it",
        )
