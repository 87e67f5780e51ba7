"""Translations that are declared rather than written: operators of ONNX over the arguments of one of torch's.

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
from sardonyx.translate.functional import functional_of, written


class Arg:
    """An argument of torch's operator as an attribute of ONNX's: `Softmax("self", axis=Arg("dim"))`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Arg({self.name!r})"


class Node:
    """An operator of ONNX. Operands are arguments, by their names, other nodes, and numbers; attributes are values.

    Operands that ONNX wants in one type are promoted as torch promotes, and what it does not take in their type is cast
    to the result's.
    """

    def __init__(self, op_type: str, *operands: Any, **attributes: Any) -> None:
        self._op_type, self._operands, self._attributes = op_type, operands, attributes
        _check_node(op_type, operands, attributes)

    def __repr__(self) -> str:
        given = [*map(repr, self._operands), *(f"{name}={value!r}" for name, value in self._attributes.items())]
        return f"{self._op_type}({', '.join(given)})"

    def names(self) -> set[str]:
        """The arguments that it takes."""
        found = {x for x in self._operands if isinstance(x, str)}
        found |= {x.name for x in self._attributes.values() if isinstance(x, Arg)}
        return found.union(*(x.names() for x in self._operands if isinstance(x, Node)))

    def append(self, g: Builder, given: Mapping[str, Any]) -> ir.Value:
        """Add it to a graph, after those that it needs."""
        operands = [self._operand(g, given, x) for x in self._operands]
        attributes = {name: given[x.name] if isinstance(x, Arg) else x for name, x in self._attributes.items()}
        signature = schemas.signature(self._op_type, g.opset)
        if signature is None:
            raise Unsupported(f"ONNX has no {self._op_type} in opset {g.opset}")
        inputs = self._typed(g, operands, signature)
        return g.node(self._op_type, inputs, dtype=self._result_type(inputs, attributes, signature), **attributes)

    def _result_type(
        self, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], signature: schemas.Signature
    ) -> ir.DataType | None:
        """The type of the result, where schemas tell it; None for that of the first operand."""
        constraint = signature.of_output(0)
        only = signature.only(constraint)
        if only is not None:
            return ir.DataType[only.removeprefix("tensor(").removesuffix(")").upper()]
        if self._op_type == "ConstantOfShape":
            return ir.tensor(attributes["value"]).dtype if "value" in attributes else ir.DataType.FLOAT
        like = (x for place, x in enumerate(inputs) if x is not None and signature.of_input(place) == constraint)
        return next((x.dtype for x in like), None)

    def _operand(self, g: Builder, given: Mapping[str, Any], operand: Any) -> Any:
        if isinstance(operand, Node):
            return operand.append(g, given)
        return given[operand] if isinstance(operand, str) else operand

    def _typed(self, g: Builder, operands: Sequence[Any], signature: schemas.Signature) -> list[ir.Value | None]:
        """Operands as tensors, those of one type variable in one dtype that ONNX has the operator for."""
        together: defaultdict[str, list[Any]] = defaultdict(list)
        for place, operand in enumerate(operands):
            if operand is not None:
                together[signature.of_input(place)].append(operand)
        chosen = {name: self._dtype(g, name, found, signature) for name, found in together.items()}
        return [None if x is None else g.cast(x, chosen[signature.of_input(i)]) for i, x in enumerate(operands)]

    def _dtype(self, g: Builder, constraint: str, operands: Sequence[Any], signature: schemas.Signature) -> torch.dtype:
        allowed = signature.allowed.get(constraint, frozenset({constraint}))
        promoted = _promoted(g, operands)
        able = [dtype for dtype in (promoted, g.out.dtype, torch.int64, torch.bool) if _spelled(dtype) in allowed]
        return able[0] if able else promoted  # which is cast around where engines lack it, or refused by name


def _promoted(g: Builder, operands: Sequence[Any]) -> torch.dtype:
    if len(operands) == 1:
        return g.dtype(operands[0]) if isinstance(operands[0], ir.Value) else g.result_type(operands[0], operands[0])
    return reduce(torch.promote_types, (g.result_type(operands[0], x) for x in operands[1:]))


@cache
def _spelled(dtype: torch.dtype) -> str:
    return f"tensor({dtypes.to_onnx(dtype).name.lower()})"


class SignatureOnly:
    """An operator whose body on the device is written by hand: the function given, called as torch calls the operator.

    Without one it says that the device has such a body already; where it has none, declaring it is an error.
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"SignatureOnly({'' if self.function is None else self.function!r})"


def __getattr__(name: str) -> Callable[..., Node]:
    if name not in _operators():
        raise AttributeError(f"ONNX has no operator {name!r}{_suggestion(name, _operators())}")
    return partial(Node, name)


@cache
def _operators() -> Mapping[str, onnx.defs.OpSchema]:
    """The operators of ONNX's own domain, by name, in their newest version."""
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
        raise DeclarationError(f"ONNX's {op_type} takes {takes}, and is given {len(operands)} operands")


def _suggestion(name: str, known: Iterable[str]) -> str:
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


DECLARED: dict[str, Node] = {}
"""What was declared, by qualified names."""


def declare(operators: Mapping[str, Node], *, replace: bool = False) -> None:
    """Add to the table what operators are, by their qualified names; with `replace` in place of what it has."""
    made = {name: translation(name, node) for name, node in operators.items()}
    for name, translate in made.items():
        table.register(name, translate, replace=replace)
    DECLARED.update(operators)


def translation(name: str, node: Node) -> table.Translation:
    """What is declared, as the table has it. Arguments that are not among those of torch's operator are an error."""
    operator = table.operator_of(name)
    arguments = operator._schema.arguments
    _refuse_writing(operator)
    unknown = node.names() - {a.name for a in arguments}
    if unknown:
        takes = ", ".join(a.name for a in arguments)
        near = _suggestion(min(unknown), [a.name for a in arguments])
        raise DeclarationError(f"{name} takes {takes}, and not {', '.join(sorted(unknown))}{near}")
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}

    def translate(g: Builder, *args: Any, **kwargs: Any) -> ir.Value:
        given = defaults | dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        return g.cast(node.append(g, given), g.out.dtype)

    return translate


def _refuse_writing(operator: Any) -> None:
    """What is declared is a value. Operators that write one somewhere follow from the one that returns it."""
    names = written(operator)
    if names:
        functional = functional_of(operator)
        instead = "the operator that returns the value" if functional is None else repr(functional.name())
        raise DeclarationError(
            f"{operator.name()} writes to {', '.join(names)}, and a declaration says what an operator returns",
            hint=f"declare {instead}: its in-place and out= variants follow from it",
        )
