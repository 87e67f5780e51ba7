"""What an operator takes and gives, from one line: `"mydomain::Scale(Tensor x, *, float factor=2.0) -> Tensor"`."""

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

Kind: TypeAlias = Literal["required", "optional", "variadic"]
Dtypes: TypeAlias = Sequence[Any] | Mapping[str, Sequence[Any]] | None
"""What type variables stand for: dtypes for all of them, dtypes for each, or dicts that have one dtype for each."""

VARIABLE = "T"
"""The type of a tensor for which the signature names none."""
FLOATS = ("float32", "float64", "float16", "bfloat16")
"""What a type variable stands for where nothing else is said."""

MOST_TENSORS = 64
"""That an operator takes, and that it gives."""

ATTRIBUTES: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "str": str, "int[]": list, "float[]": list}
"""The types of attributes, as torch's schemas write them."""

_NAME = r"[A-Za-z_]\w*"
_TENSOR = re.compile(rf"Tensor(?:<\s*({_NAME})?\s*(?:,\s*(\d+)\s*)?>)?(\?|\[\])?", re.ASCII)
_QUALIFIED = re.compile(rf"\s*({_NAME})::({_NAME})(\.{_NAME})?\s*", re.ASCII)


@dataclass(frozen=True)
class Tensor:
    """A tensor that an operator takes or gives."""

    name: str
    type: str
    """A dtype by its name in torch, or a type variable."""
    rank: int | None = None
    kind: Kind = "required"


@dataclass(frozen=True)
class Attribute:
    """A number, a text or a list of numbers that an operator takes."""

    name: str
    type: str
    default: Any = None
    required: bool = False


NEWEST_VERSION = 1000
"""Of a domain of custom operators in ONNX Runtime."""


@dataclass(frozen=True)
class Identity:
    """How ONNX knows an operator."""

    domain: str
    name: str
    version: int = 1
    """Of the domain, from which on it is there."""


@dataclass(frozen=True)
class Signature:
    """An operator's name, what it takes, and what it gives."""

    namespace: str
    name: str
    parameters: tuple[Tensor | Attribute, ...]
    keyword_only: int
    """How many of the parameters are given by name alone: the last ones."""
    outputs: tuple[Tensor, ...]
    choices: tuple[Mapping[str, str], ...]
    """The dtypes, by name, that the type variables stand for together; it has a kernel for each choice."""

    @property
    def qualified(self) -> str:
        """`"mydomain::Scale"`."""
        return f"{self.namespace}::{self.name}"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that it takes."""
        return tuple(p for p in self.parameters if isinstance(p, Tensor))

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """What it takes beside tensors."""
        return tuple(p for p in self.parameters if isinstance(p, Attribute))

    @cached_property
    def types(self) -> Mapping[str, tuple[str, ...]]:
        """For each type variable the dtypes that it stands for in one choice or another."""
        return {variable: tuple(dict.fromkeys(c[variable] for c in self.choices)) for variable in self.choices[0]}

    def dtype_of(self, tensor: Tensor, chosen: Mapping[str, str]) -> torch.dtype:
        """The dtype of a tensor under a choice for the type variables."""
        found: torch.dtype = getattr(torch, chosen.get(tensor.type, tensor.type))
        return found

    def may_be_left_out(self, index: int) -> bool:
        """Whether a call can be without a parameter: it has a default, and so has what comes after it by position."""
        positional = self.parameters[: len(self.parameters) - self.keyword_only]
        return all(_has_default(p) for p in (self.parameters[index], *positional[index:]))

    def schema(self) -> str:
        """As torch's dispatcher is told."""
        written = [_written(p, self.may_be_left_out(i)) for i, p in enumerate(self.parameters)]
        if self.keyword_only:
            written.insert(len(written) - self.keyword_only, "*")
        outputs = ["Tensor" if _is_anonymous(o.name) else f"Tensor {o.name}" for o in self.outputs]
        given = outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})"
        return f"{self.name}({', '.join(written)}) -> {given}"


_SUFFIX: Mapping[Kind, str] = {"required": "", "optional": "?", "variadic": "[]"}


def _has_default(parameter: Tensor | Attribute) -> bool:
    return parameter.kind == "optional" if isinstance(parameter, Tensor) else not parameter.required


def _written(parameter: Tensor | Attribute, may_be_left_out: bool) -> str:
    kind = f"Tensor{_SUFFIX[parameter.kind]}" if isinstance(parameter, Tensor) else parameter.type
    if not _has_default(parameter) or not may_be_left_out:
        return f"{kind} {parameter.name}"
    default = None if isinstance(parameter, Tensor) else parameter.default
    shown = json.dumps(default, ensure_ascii=False) if isinstance(default, str) else default
    return f"{kind} {parameter.name}={shown}"


def is_name(text: str) -> bool:
    """Whether torch, ONNX and C++ all take it for a name."""
    return re.fullmatch(_NAME, text, re.ASCII) is not None


def _is_anonymous(name: str) -> bool:
    return re.fullmatch(r"output\d*", name) is not None


def is_unnamed(name: str) -> bool:
    """Whether torch made the name up, `_0`, for a schema inferred from a C++ function."""
    return re.fullmatch(r"_\d+", name) is not None


def parse(text: str, types: Dtypes = None) -> Signature:
    """Read a signature: a schema as torch writes it, in which a tensor may have a type and a rank, `Tensor<T, 4>`.

    `types` says which dtypes the type variables stand for: for all of them, for each by its name, or, as a list of
    dicts, for all at once.

    >>> made = parse("my::Scale(Tensor x, Tensor<int64> at, *, float factor=2.0) -> Tensor", ["float32"])
    >>> made.schema(), [t.type for t in made.inputs]
    ('Scale(Tensor x, Tensor at, *, float factor=2.0) -> Tensor', ['T', 'int64'])
    """
    try:
        return _parsed(text, types)
    except DeclarationError as error:
        hint = error.hint or 'like "mydomain::Scale(Tensor x, *, float factor=2.0) -> Tensor"'
        raise DeclarationError(f"the signature {text!r} cannot be read: {error.what}", hint=hint) from None


def _parsed(text: str, types: Dtypes) -> Signature:
    head, paren, rest = text.partition("(")
    named = _QUALIFIED.fullmatch(head)
    if not paren or named is None:
        raise DeclarationError("it does not begin with domain::Name(")
    if named[3] and named[3] != ".default":
        raise DeclarationError(f"it has the overload {named[3][1:]!r}, and an operator of ONNX has none")
    inside, arrow, outside = rest.rpartition("->")
    if not arrow or not inside.rstrip().endswith(")"):
        raise DeclarationError("it has no results: write ') -> Tensor' at its end")
    parameters, keyword_only = _parameters(inside.rstrip()[:-1])
    outputs = _outputs(outside.strip())
    _check_names([*parameters, *outputs])
    inputs = [p for p in parameters if isinstance(p, Tensor)]
    return Signature(named[1], named[2], tuple(parameters), keyword_only, outputs, _choices(inputs, outputs, types))


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
        raise DeclarationError("nothing comes after its star")
    _check_number(tensors)
    return parameters, 0 if positional is None else len(parameters) - positional


def _check_number(tensors: Sequence[Tensor]) -> None:
    if len(tensors) > MOST_TENSORS:
        raise DeclarationError(f"it has {len(tensors)} tensors on one side, more than {MOST_TENSORS}")


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are outside of brackets and quotes."""
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
            f"{name} has the type {kind!r}", hint=f"an attribute is one of {', '.join(ATTRIBUTES)}; the rest is Tensor"
        )
    if not equals:
        return Attribute(name, kind, required=True)
    return Attribute(name, kind, _default(name, kind, default.strip()))


_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def _default(name: str, kind: str, text: str) -> Any:
    try:
        value = _NOT_FINITE[text] if text in _NOT_FINITE else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise DeclarationError(f"the default of {name}, {text}, is not a constant") from None
    value = float(value) if kind == "float" and type(value) is int else value
    value = [float(x) for x in value] if kind == "float[]" and isinstance(value, list) else value
    items = value if isinstance(value, list) else [value]
    if any(isinstance(x, float) and not math.isfinite(x) for x in items):
        raise DeclarationError(f"the default of {name} is {text}, which a schema of torch cannot have")
    if any(isinstance(x, int) and not -(2**63) < x < 2**63 for x in items):
        raise DeclarationError(f"the default of {name}, {text}, does not fit into 64 bits")
    of = {"int[]": int, "float[]": float}.get(kind, ATTRIBUTES[kind])
    if not isinstance(value, ATTRIBUTES[kind]) or any(type(x) is not of for x in items):
        raise DeclarationError(f"the default of {name}, {text}, is no {kind}")
    return value


def _tensor(kind: str, name: str) -> Tensor:
    found = _TENSOR.fullmatch(kind)
    if found is None:
        raise DeclarationError(
            f"{name} has the type {kind!r}", hint='a tensor is "Tensor", "Tensor<T>", "Tensor<T, 4>"; then "?" or "[]"'
        )
    kinds: Mapping[str | None, Kind] = {None: "required", "?": "optional", "[]": "variadic"}
    return Tensor(name, _spelled_out(found[1] or VARIABLE), int(found[2]) if found[2] else None, kinds[found[3]])


def _spelled_out(kind: str) -> str:
    """The name that a dtype has in torch's messages, of another of its names: float32 for float."""
    dtype = getattr(torch, kind, None)
    return _dtype_name(dtype) if isinstance(dtype, torch.dtype) else kind


def _outputs(text: str) -> tuple[Tensor, ...]:
    several = text.startswith("(")
    if several and not text.endswith(")"):
        raise DeclarationError("the bracket around its results is not closed")
    made = []
    for index, part in enumerate(_split(text[1:-1] if several else text)):
        kind, _, name = part.rpartition(" ") if re.search(r"\s\w+$", part) else (part, "", "_0")
        name = f"output{index}" if is_unnamed(name) else name
        tensor = _tensor(kind.strip(), "output" if not several and name == "output0" else name)
        if not is_name(tensor.name):
            raise DeclarationError(f"its result {part!r} is not a type and a name")
        if tensor.kind != "required":
            raise DeclarationError(f"its result {part!r} is optional or a list, which is not supported")
        made.append(tensor)
    if not made:
        raise DeclarationError("it has no results")
    _check_number(made)
    return tuple(made)


def _check_names(parameters: Sequence[Tensor | Attribute]) -> None:
    names = [p.name for p in parameters]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise DeclarationError(
            f"two of its parameters and results are called {twice}",
            hint="give the result a name, ') -> Tensor y'" if _is_anonymous(twice) else "give each its own name",
        )


def _choices(inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: Dtypes) -> tuple[Mapping[str, str], ...]:
    used = tuple(dict.fromkeys(t.type for t in (*inputs, *outputs) if not _is_dtype(t.type)))
    if isinstance(given, Sequence) and any(isinstance(x, Mapping) for x in given):
        rows = [_row(used, choice) for choice in given]
    else:
        rows = list(itertools.product(*_types(used, given).values()))
    found = tuple(dict(zip(used, row, strict=True)) for row in dict.fromkeys(rows))
    _check_results(found, {t.type for t in inputs})
    return found


def _row(used: Sequence[str], choice: Any) -> tuple[str, ...]:
    if not isinstance(choice, Mapping) or set(choice) != set(used):
        raise DeclarationError(
            f"its types are {', '.join(used) or 'no variables'}, and dtypes has the choice {choice!r}",
            hint='a choice has a dtype for each, {"X": "int64", "T": "float32"}',
        )
    return tuple(_dtype_name(choice[variable]) for variable in used)


def _types(used: Sequence[str], given: Dtypes) -> dict[str, tuple[str, ...]]:
    by_name = dict(given) if isinstance(given, Mapping) else dict.fromkeys(used, FLOATS if given is None else given)
    for variable in by_name:
        if variable not in used:
            raise DeclarationError(f"dtypes has {variable!r}, and no tensor is of this type")
    found = {}
    for variable in used:
        names = by_name.get(variable, FLOATS)
        if isinstance(names, str) or not names:
            raise DeclarationError(f"the dtypes of {variable} are {names!r}", hint='use a list, ["float32", "float64"]')
        found[variable] = tuple(_dtype_name(name) for name in names)
    return found


def _check_results(choices: Sequence[Mapping[str, str]], taken: Collection[str]) -> None:
    """What it takes must say which type a result has."""
    first: dict[tuple[str, ...], Mapping[str, str]] = {}
    for choice in choices:
        other = first.setdefault(tuple(choice[variable] for variable in choice if variable in taken), choice)
        for variable in choice:
            if choice[variable] != other[variable]:
                names = tuple(dict.fromkeys(c[variable] for c in choices))
                raise DeclarationError(
                    f"nothing that it takes says which of {', '.join(names)} its result is",
                    hint=f'name one dtype, "-> Tensor<{names[0]}>"',
                )


def _is_dtype(name: str) -> bool:
    dtype = getattr(torch, name, None)
    return isinstance(dtype, torch.dtype) and dtypes.is_known(dtype) and not dtype.is_complex


def _dtype_name(given: Any) -> str:
    dtype = getattr(torch, str(given).removeprefix("torch."), None)
    name = str(dtype).removeprefix("torch.")
    if not _is_dtype(name) or dtypes.to_onnx(dtype) > ir.DataType.BFLOAT16:  # type: ignore[arg-type]
        raise DeclarationError(f"{given!r} is no dtype that a kernel can have", hint='like "float32" or torch.int64')
    return name
