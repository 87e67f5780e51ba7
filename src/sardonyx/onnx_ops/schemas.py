"""The supported operators and their torch schemas, derived from ONNX Runtime's schemas and kernels."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.engines.registry import find
from sardonyx.errors import MissingDependency

NAMESPACE = "ort"
MICROSOFT = "com.microsoft"
OUTPUTS = "outputs"
"""The argument that selects outputs, and the overload that has it."""

Arity: TypeAlias = Literal["required", "optional", "variadic"]

_ATTRIBUTES = {
    "INT": "int",
    "FLOAT": "float",
    "STRING": "str",
    "INTS": "int[]",
    "FLOATS": "float[]",
    "STRINGS": "str[]",
}
_ARITIES: dict[str, Arity] = {"Single": "required", "Optional": "optional", "Variadic": "variadic"}
_RANDOM = frozenset({"Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"})
_EXCLUDED = frozenset({"OptionalHasElement", "OptionalGetElement", "SampleOp", "Bernoulli", "AttnLSTM"})
"""Operators on optional values, which are not tensors; an ONNX Runtime example; one that ONNX expands to an operator
without a kernel; and one that crashes on mismatched operands."""
_OPEN_ENDED = 2**31
"""End of the version range of a kernel that was the newest when written. It runs its first version only."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operator."""

    name: str
    kind: Arity


@dataclass(frozen=True)
class Attribute:
    """An attribute of an operator. An optional one without a default is None, and then absent from the node."""

    name: str
    type: str
    required: bool
    default: Any

    def schema(self) -> str:
        """Return it as an argument of a torch schema."""
        if self.required:
            return f"{self.type} {self.name}"
        if self.default is None:
            return f"{self.type}? {self.name}=None"
        return (
            f'{self.type} {self.name}="{self.default}"'
            if self.type == "str"
            else f"{self.type} {self.name}={self.default}"
        )


@dataclass(frozen=True, eq=False)  # singletons, hashed on every call
class Operator:
    """An ONNX operator, in the newest version that the engine runs."""

    domain: str
    op_type: str
    version: int
    inputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[Tensor, ...]

    @cached_property
    def name(self) -> str:
        """The torch name; a com.microsoft operator whose name ONNX has too gets a prefix."""
        name = snake_case(self.op_type)
        return f"microsoft_{name}" if self.domain and self.op_type in _onnx_names() else name

    @property
    def default_outputs(self) -> int:
        """Number of results of a call without `outputs`: the required outputs."""
        return max(1, sum(t.kind == "required" for t in self.outputs))

    @property
    def is_random(self) -> bool:
        """Whether equal calls may give different results."""
        return self.op_type in _RANDOM

    def overloads(self) -> list[str]:
        """Return the names of the torch overloads: the default, and the one with `outputs`."""
        if self.outputs[-1].kind == "variadic":
            return [""]
        return ["", OUTPUTS] if len(self.outputs) > self.default_outputs else [""]

    def schema(self, overload: str = "") -> str:
        """Return the torch schema of an overload, without the namespace.

        >>> find_operator("hard_sigmoid").schema()
        'hard_sigmoid(Tensor X, *, float alpha=0.2, float beta=0.5) -> Tensor'
        """
        keywords, result = list(self._keyword_arguments()), self._return_type()
        if self.outputs[-1].kind == "variadic":
            keywords, result = [f"int {OUTPUTS}", *keywords], "Tensor[]"
        elif overload:
            keywords, result = [f"int[] {OUTPUTS}", *keywords], "Tensor[]"
        arguments = ", ".join([*self._positional_arguments(), *(["*", *keywords] if keywords else [])])
        return f"{self.name}{'.' if overload else ''}{overload}({arguments}) -> {result}"

    def _positional_arguments(self) -> Iterator[str]:
        for i, tensor in enumerate(self.inputs):
            if tensor.kind == "variadic":
                yield f"Tensor[] {tensor.name}"
            elif tensor.kind == "required":
                yield f"Tensor {tensor.name}"
            else:
                last = all(later.kind == "optional" for later in self.inputs[i:])
                yield f"Tensor? {tensor.name}{'=None' if last else ''}"

    def _keyword_arguments(self) -> Iterator[str]:
        return (attribute.schema() for attribute in self.attributes)

    def _return_type(self) -> str:
        return "Tensor" if self.default_outputs == 1 else f"({', '.join(['Tensor'] * self.default_outputs)})"


_RESPELLED = {"MatMul": "Matmul", "NBits": "Nbits", "NaN": "Nan", "MoE": "Moe", "PRelu": "Prelu", "Col2Im": "Col2im"}
_RESPELLED |= {"CDist": "Cdist", "NGram": "Ngram", "SiLU": "Silu"}
_LOGIC = {"And", "Or", "Not", "Xor"}


def snake_case(op_type: str) -> str:
    """Return an operator's name in snake case; three ONNX names are Python keywords and get a prefix.

    >>> [snake_case(x) for x in ("LayerNormalization", "QLinearMatMul", "MatMulNBits", "LSTM", "IsNaN", "Not")]
    ['layer_normalization', 'qlinear_matmul', 'matmul_nbits', 'lstm', 'is_nan', 'logical_not']
    """
    if op_type in _LOGIC:
        return f"logical_{op_type.lower()}"
    for old, new in _RESPELLED.items():
        op_type = op_type.replace(old, new)
    op_type = re.sub(r"^Q([A-Z])", lambda match: f"Q{match[1].lower()}", op_type)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", op_type).lower()


# Operators of ONNX Runtime


@cache
def operators() -> tuple[Operator, ...]:
    """Return every operator that ONNX Runtime runs on the CPU and whose inputs and outputs are tensors.

    >>> len(operators()) > 200, [x.name for x in operators() if x.op_type == "Gelu"]
    (True, ['gelu', 'microsoft_gelu'])
    """
    return tuple(_operator(schema) for schema in _schemas() if _is_expressible(schema))


@cache
def find_operator(name: str) -> Operator:
    """Return the operator with this torch name."""
    return next(x for x in operators() if x.name == name)


@cache
def opset() -> int:
    """Return the opset version of the nodes."""
    return find("onnxruntime").opset(torch.device("cpu"), frozenset())


@cache
def _onnx_names() -> frozenset[str]:
    return frozenset(schema.name for schema in _schemas() if not schema.domain)


@cache
def _schemas() -> tuple[Any, ...]:
    """Return the newest schema of each operator that runs, by name, ONNX's before com.microsoft's."""
    engine = find("onnxruntime")
    probe = engine.probe()
    if not probe.installed:
        raise MissingDependency(
            f"ONNX's operators need onnxruntime: {probe.reason}", hint='pip install "sardonyx[cpu]"'
        )
    newest: dict[tuple[str, str], Any] = {}
    for schema in _all_schemas():
        key = schema.domain, schema.name
        if schema.domain not in ("", MICROSOFT) or (not schema.domain and schema.since_version > opset()):
            continue
        if key not in newest or newest[key].since_version < schema.since_version:
            newest[key] = schema
    kernels = engine.kernels(torch.device("cpu"))
    table = {} if kernels is None else kernels.table
    return tuple(newest[key] for key in sorted(newest) if _runs(newest[key], table))


def _all_schemas() -> Sequence[Any]:
    from onnxruntime.capi import onnxruntime_pybind11_state

    return onnxruntime_pybind11_state.get_all_operator_schema()  # type: ignore[no-any-return]


def _runs(schema: Any, kernels: Any) -> bool:
    """Return whether ONNX Runtime has a kernel of this version, or ONNX defines the operator as a function."""
    if schema.deprecated or schema.name in _EXCLUDED or not (schema.domain or onnx.defs.has(schema.name)):
        return False  # ONNX Runtime has operators in the ONNX domain that onnx does not define
    version = schema.since_version
    ranges = [versions for versions, _ in kernels.get((schema.domain, schema.name), ())]
    if any(version == x.start or (x.stop != _OPEN_ENDED and version in x) for x in ranges):
        return True
    if schema.domain:
        return False
    formal: Any = onnx.defs.get_schema(schema.name, version)
    return bool(formal.has_function or formal.has_context_dependent_function)


def _is_expressible(schema: Any) -> bool:
    """Return whether torch can call it: tensors, and attributes that are numbers and strings."""
    values = (*schema.inputs, *schema.outputs)
    attributes = schema.attributes.values()
    return bool(schema.inputs) and all(map(_is_tensor, values)) and all(a.type.name in _ATTRIBUTES for a in attributes)


def _is_tensor(value: Any) -> bool:
    return any(kind in _torch_dtypes() for kind in value.types)


@cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    by_name = {}
    for dtype in ir.DataType:
        try:
            by_name[f"tensor({dtype.name.lower()})"] = dtypes.to_torch(dtype)
        except KeyError:
            continue
    return by_name


def dtype_of(type_name: str) -> torch.dtype | None:
    """Return the dtype for an ONNX Runtime type name such as `"tensor(float)"`, or None if torch has none."""
    return _torch_dtypes().get(type_name)


def _operator(schema: Any) -> Operator:
    attributes = sorted(map(_attribute, schema.attributes.values()), key=lambda a: (not a.required, a.name))
    return Operator(
        schema.domain,
        schema.name,
        schema.since_version,
        tuple(map(_tensor, schema.inputs)),
        tuple(attributes),
        tuple(map(_tensor, schema.outputs)),
    )


def _tensor(value: Any) -> Tensor:
    name = f"{value.name}_" if keyword.iskeyword(value.name) else value.name
    return Tensor(name, _ARITIES[value.option.name])


def _attribute(attribute: Any) -> Attribute:
    kind = _ATTRIBUTES[attribute.type.name]
    return Attribute(attribute.name, kind, attribute.required, None if kind.endswith("[]") else _default(attribute))


def _default(attribute: Any) -> Any:
    if not attribute._default_value:
        return None
    value = onnx.helper.get_attribute_value(onnx.AttributeProto.FromString(attribute._default_value))
    if isinstance(value, bytes):
        return value.decode()
    return float(str(np.float32(value))) if isinstance(value, float) else value
