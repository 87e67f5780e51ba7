"""Parse the signature of an operator: `"mydomain::Scale(Tensor x, *, float factor=2.0) -> Tensor"`."""

from __future__ import annotations

import ast
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import DeclarationError

Arity: TypeAlias = Literal["required", "optional", "variadic"]
Dtypes: TypeAlias = Sequence[Any] | Mapping[str, Sequence[Any]] | None
"""Dtypes of the type variables: a list for all of them, a list for each, or dicts with one dtype for each."""

VARIABLE = "T"
"""The type variable of a tensor without a type."""
FLOATS = ("float32", "float64", "float16", "bfloat16")
"""The default dtypes of a type variable."""

MAX_TENSORS = 64
"""The largest number of tensor inputs, and of outputs."""

ATTRIBUTES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "int[]": list, "float[]": list}
"""Attribute types, as in torch schemas."""

_NAME = r"[A-Za-z_]\w*"
_TENSOR = re.compile(rf"Tensor(?:<\s*({_NAME})?\s*(?:,\s*(\d+)\s*)?>)?(\?|\[\])?", re.ASCII)
_QUALIFIED = re.compile(rf"\s*({_NAME})::({_NAME})(\.{_NAME})?\s*", re.ASCII)


@dataclass(frozen=True)
class Tensor:
    """A tensor parameter or result of an operator."""

    name: str
    type: str
    """The name of a torch dtype, or a type variable."""
    rank: int | None = None
    kind: Arity = "required"


@dataclass(frozen=True)
class Attribute:
    """A number, string or list of numbers that an operator takes."""

    name: str
    type: str
    default: Any = None
    required: bool = False


MAX_VERSION = 1000
"""The largest version of a custom operator domain in ONNX Runtime."""


@dataclass(frozen=True)
class Identity:
    """The ONNX domain, name and version of an operator."""

    domain: str
    name: str
    version: int = 1
    """The domain version that introduced it."""


@dataclass(frozen=True)
class Signature:
    """An operator's name, parameters and results."""

    namespace: str
    name: str
    parameters: tuple[Tensor | Attribute, ...]
    keyword_only: int
    """Number of keyword-only parameters, which are the last ones."""
    outputs: tuple[Tensor, ...]
    choices: tuple[Mapping[str, str], ...]
    """Supported combinations of dtypes for the type variables; there is a kernel for each."""

    @property
    def qualified(self) -> str:
        """`"mydomain::Scale"`."""
        return f"{self.namespace}::{self.name}"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensor parameters."""
        return tuple(p for p in self.parameters if isinstance(p, Tensor))

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """The other parameters."""
        return tuple(p for p in self.parameters if isinstance(p, Attribute))

    @cached_property
    def types(self) -> Mapping[str, tuple[str, ...]]:
        """For each type variable, its dtypes over all choices."""
        return {variable: tuple(dict.fromkeys(c[variable] for c in self.choices)) for variable in self.choices[0]}

    def dtype_of(self, tensor: Tensor, choice: Mapping[str, str]) -> torch.dtype:
        """Return the dtype of a tensor for a choice."""
        dtype: torch.dtype = getattr(torch, choice.get(tensor.type, tensor.type))
        return dtype

    def is_optional(self, index: int) -> bool:
        """Return whether a call can omit a parameter: it and all later positional ones have defaults."""
        positional = self.parameters[: len(self.parameters) - self.keyword_only]
        return all(_has_default(p) for p in (self.parameters[index], *positional[index:]))

    def schema(self) -> str:
        """Return the torch schema, without the namespace."""
        parameters = [_parameter_schema(p, self.is_optional(i)) for i, p in enumerate(self.parameters)]
        if self.keyword_only:
            parameters.insert(len(parameters) - self.keyword_only, "*")
        outputs = ["Tensor" if _is_anonymous(o.name) else f"Tensor {o.name}" for o in self.outputs]
        results = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
        return f"{self.name}({', '.join(parameters)}) -> {results}"


_SUFFIX: Mapping[Arity, str] = {"required": "", "optional": "?", "variadic": "[]"}


def _has_default(parameter: Tensor | Attribute) -> bool:
    return parameter.kind == "optional" if isinstance(parameter, Tensor) else not parameter.required


def _parameter_schema(parameter: Tensor | Attribute, is_optional: bool) -> str:
    kind = f"Tensor{_SUFFIX[parameter.kind]}" if isinstance(parameter, Tensor) else parameter.type
    if not _has_default(parameter) or not is_optional:
        return f"{kind} {parameter.name}"
    default = None if isinstance(parameter, Tensor) else parameter.default
    text = json.dumps(default, ensure_ascii=False) if isinstance(default, str) else default
    return f"{kind} {parameter.name}={text}"


def is_name(text: str) -> bool:
    """Return whether torch, ONNX and C++ all accept a name."""
    return re.fullmatch(_NAME, text, re.ASCII) is not None


def _is_anonymous(name: str) -> bool:
    return re.fullmatch(r"output\d*", name) is not None


def is_unnamed(name: str) -> bool:
    """Return whether torch generated the name (`_0`), for a schema inferred from a C++ function."""
    return re.fullmatch(r"_\d+", name) is not None


def parse(text: str, types: Dtypes = None) -> Signature:
    """Parse a signature: a torch schema in which a tensor may have a type and a rank, `Tensor<T, 4>`.

    `types` lists the dtypes of the type variables: for all of them, for each by name, or as a list of dicts with one
    for each.

    >>> signature = parse("my::Scale(Tensor x, Tensor<int64> at, *, float factor=2.0) -> Tensor", ["float32"])
    >>> signature.schema(), [t.type for t in signature.inputs]
    ('Scale(Tensor x, Tensor at, *, float factor=2.0) -> Tensor', ['T', 'int64'])
    """
    try:
        return _parse(text, types)
    except DeclarationError as error:
        hint = error.hint or 'write it like "mydomain::Scale(Tensor x, *, float factor=2.0) -> Tensor"'
        raise DeclarationError(f"invalid signature {text!r}: {error.what}", hint=hint) from None


def _parse(text: str, types: Dtypes) -> Signature:
    head, paren, rest = text.partition("(")
    match = _QUALIFIED.fullmatch(head)
    if not paren or match is None:
        raise DeclarationError("it does not start with domain::Name(")
    if match[3] and match[3] != ".default":
        raise DeclarationError(f"it has the overload {match[3][1:]!r}, and ONNX operators have none")
    inside, arrow, outside = rest.rpartition("->")
    if not arrow or not inside.rstrip().endswith(")"):
        raise DeclarationError("it has no results: write ') -> Tensor' at its end")
    parameters, keyword_only = _parameters(inside.rstrip()[:-1])
    outputs = _outputs(outside.strip())
    _check_names([*parameters, *outputs])
    inputs = [p for p in parameters if isinstance(p, Tensor)]
    return Signature(match[1], match[2], tuple(parameters), keyword_only, outputs, _choices(inputs, outputs, types))


def _parameters(text: str) -> tuple[list[Tensor | Attribute], int]:
    parameters: list[Tensor | Attribute] = []
    positional: int | None = None
    for part in _split(text):
        if part == "*":
            if positional is not None:
                raise DeclarationError("it has two stars")
            positional = len(parameters)
        else:
            parameters.append(_parameter(part))
    tensors = [p for p in parameters if isinstance(p, Tensor)]
    if any(t.kind == "variadic" for t in tensors[:-1]):
        raise DeclarationError("only the last of its tensors can be a list")
    if positional == len(parameters):
        raise DeclarationError("nothing follows its star")
    _check_number(tensors)
    return parameters, 0 if positional is None else len(parameters) - positional


def _check_number(tensors: Sequence[Tensor]) -> None:
    if len(tensors) > MAX_TENSORS:
        raise DeclarationError(f"it has {len(tensors)} tensors on one side, more than {MAX_TENSORS}")


def _split(text: str) -> Iterator[str]:
    """Split at commas outside of brackets and quotes."""
    depth, quote, part, escaped = 0, "", "", False
    for character in text:
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[<(") - (character in "]>)")
        if character == "," and not depth and not quote:
            yield part.strip()
            part = ""
        else:
            part += character
    if part.strip():
        yield part.strip()


def _parameter(part: str) -> Tensor | Attribute:
    declared, equals, default = part.partition("=")
    kind, _, name = declared.strip().rpartition(" ")
    kind = kind.strip()
    if not is_name(name) or not kind:
        raise DeclarationError(f"{part!r} is not a type and a name")
    if kind.startswith("Tensor"):
        tensor = _tensor(kind, name)
        if equals and not (tensor.kind == "optional" and default.strip() == "None"):
            raise DeclarationError(f"{name} is a tensor and has the default {default.strip()}")
        return tensor
    kind = re.sub(r"^SymInt", "int", kind)
    if kind not in ATTRIBUTES:
        raise DeclarationError(
            f"{name} has the type {kind!r}", hint=f"use Tensor, or an attribute type: {', '.join(ATTRIBUTES)}"
        )
    if not equals:
        return Attribute(name, kind, required=True)
    return Attribute(name, kind, _default(name, kind, default.strip()))


_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _default(name: str, kind: str, text: str) -> Any:
    try:
        value = _NON_FINITE[text] if text in _NON_FINITE else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise DeclarationError(f"the default of {name}, {text}, is not a constant") from None
    value = float(value) if kind == "float" and type(value) is int else value
    value = [float(x) for x in value] if kind == "float[]" and isinstance(value, list) else value
    items = value if isinstance(value, list) else [value]
    if any(isinstance(x, float) and not math.isfinite(x) for x in items):
        raise DeclarationError(f"the default of {name} is {text}, which torch schemas do not support")
    if any(isinstance(x, int) and not -(2**63) < x < 2**63 for x in items):
        raise DeclarationError(f"the default of {name}, {text}, does not fit into 64 bits")
    item_type = {"int[]": int, "float[]": float}.get(kind, ATTRIBUTES[kind])
    if not isinstance(value, ATTRIBUTES[kind]) or any(type(x) is not item_type for x in items):
        raise DeclarationError(f"the default of {name}, {text}, is not of type {kind}")
    return value


def _tensor(kind: str, name: str) -> Tensor:
    match = _TENSOR.fullmatch(kind)
    if match is None:
        raise DeclarationError(
            f"{name} has the type {kind!r}", hint='a tensor is "Tensor", "Tensor<T>", "Tensor<T, 4>"; then "?" or "[]"'
        )
    arities: Mapping[str | None, Arity] = {None: "required", "?": "optional", "[]": "variadic"}
    return Tensor(name, _canonical_dtype(match[1] or VARIABLE), int(match[2]) if match[2] else None, arities[match[3]])


def _canonical_dtype(kind: str) -> str:
    """Return torch's canonical name of a dtype: float32 for float."""
    dtype = getattr(torch, kind, None)
    return _dtype_name(dtype) if isinstance(dtype, torch.dtype) else kind


def _outputs(text: str) -> tuple[Tensor, ...]:
    is_tuple = text.startswith("(")
    if is_tuple and not text.endswith(")"):
        raise DeclarationError("the parenthesis around its results is not closed")
    tensors = []
    for index, part in enumerate(_split(text[1:-1] if is_tuple else text)):
        kind, _, name = part.rpartition(" ") if re.search(r"\s\w+$", part) else (part, "", "_0")
        name = f"output{index}" if is_unnamed(name) else name
        tensor = _tensor(kind.strip(), "output" if not is_tuple and name == "output0" else name)
        if not is_name(tensor.name):
            raise DeclarationError(f"its result {part!r} is not a type and a name")
        if tensor.kind != "required":
            raise DeclarationError(f"its result {part!r} is optional or a list, which is not supported")
        tensors.append(tensor)
    if not tensors:
        raise DeclarationError("it has no results")
    _check_number(tensors)
    return tuple(tensors)


def _check_names(parameters: Sequence[Tensor | Attribute]) -> None:
    names = [p.name for p in parameters]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise DeclarationError(
            f"two of its parameters or results are called {duplicate}",
            hint="give the result a name, ') -> Tensor y'" if _is_anonymous(duplicate) else "give each its own name",
        )


def _choices(inputs: Sequence[Tensor], outputs: Sequence[Tensor], types: Dtypes) -> tuple[Mapping[str, str], ...]:
    used = tuple(dict.fromkeys(t.type for t in (*inputs, *outputs) if not _is_dtype(t.type)))
    if isinstance(types, Sequence) and any(isinstance(x, Mapping) for x in types):
        rows = [_choice_row(used, choice) for choice in types]
    else:
        rows = list(itertools.product(*_types(used, types).values()))
    choices = tuple(dict(zip(used, row, strict=True)) for row in dict.fromkeys(rows))
    _check_results(choices, {t.type for t in inputs})
    return choices


def _choice_row(used: Sequence[str], choice: Any) -> tuple[str, ...]:
    if not isinstance(choice, Mapping) or set(choice) != set(used):
        raise DeclarationError(
            f"its types are {', '.join(used) or 'no variables'}, and dtypes has the choice {choice!r}",
            hint='a choice has a dtype for each, {"X": "int64", "T": "float32"}',
        )
    return tuple(_dtype_name(choice[variable]) for variable in used)


def _types(used: Sequence[str], types: Dtypes) -> dict[str, tuple[str, ...]]:
    by_name = dict(types) if isinstance(types, Mapping) else dict.fromkeys(used, FLOATS if types is None else types)
    for variable in by_name:
        if variable not in used:
            raise DeclarationError(f"dtypes has {variable!r}, and no tensor has this type")
    by_variable = {}
    for variable in used:
        names = by_name.get(variable, FLOATS)
        if isinstance(names, str) or not names:
            raise DeclarationError(f"the dtypes of {variable} are {names!r}", hint='use a list, ["float32", "float64"]')
        by_variable[variable] = tuple(_dtype_name(name) for name in names)
    return by_variable


def _check_results(choices: Sequence[Mapping[str, str]], input_types: Collection[str]) -> None:
    first: dict[tuple[str, ...], Mapping[str, str]] = {}
    for choice in choices:
        other = first.setdefault(tuple(choice[variable] for variable in choice if variable in input_types), choice)
        for variable in choice:
            if choice[variable] != other[variable]:
                names = tuple(dict.fromkeys(c[variable] for c in choices))
                raise DeclarationError(
                    f"no input determines which of {', '.join(names)} its result is",
                    hint=f'give the result a dtype: "-> Tensor<{names[0]}>"',
                )


def _is_dtype(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtypes.is_known(dtype) and not dtype.is_complex


def _dtype_name(value: Any) -> str:
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    name = str(dtype).removeprefix("torch.")
    if not _is_dtype(name) or dtypes.to_onnx(dtype) > ir.DataType.BFLOAT16:  # type: ignore[arg-type]
        raise DeclarationError(
            f"{value!r} is not a dtype that kernels support", hint='use for instance "float32" or torch.int64'
        )
    return name
