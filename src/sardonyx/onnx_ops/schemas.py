"""Which operators there are, and how each is called from torch: read off ONNX Runtime's schemas and kernels."""

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
"""The argument that says which outputs are wanted, and the overload that has it."""

Kind: TypeAlias = Literal["required", "optional", "variadic"]

_ATTRIBUTES = {
    "INT": "int",
    "FLOAT": "float",
    "STRING": "str",
    "INTS": "int[]",
    "FLOATS": "float[]",
    "STRINGS": "str[]",
}
_KINDS: dict[str, Kind] = {"Single": "required", "Optional": "optional", "Variadic": "variadic"}
_RANDOM = frozenset({"Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"})
_LEFT_OUT = frozenset({"OptionalHasElement", "OptionalGetElement", "SampleOp", "Bernoulli", "AttnLSTM"})
"""About values that may be absent, which tensors are not; an example for programmers of ONNX Runtime; one that ONNX
makes of an operator that has no kernel; and one that crashes where its operands do not fit."""
_NO_END = 2**31
"""Where the versions of a kernel end that was the newest when it was written. It runs the version it begins with."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of an operator."""

    name: str
    kind: Kind


@dataclass(frozen=True)
class Attribute:
    """An attribute of an operator. One that is not required and has no default is None, and then the node has none."""

    name: str
    type: str
    required: bool
    default: Any

    def declared(self) -> str:
        """As an argument of torch's schema."""
        if self.required:
            return f"{self.type} {self.name}"
        if self.default is None:
            return f"{self.type}? {self.name}=None"
        return (
            f'{self.type} {self.name}="{self.default}"'
            if self.type == "str"
            else f"{self.type} {self.name}={self.default}"
        )


@dataclass(frozen=True, eq=False)  # there is one of each, and every call asks for its hash
class Operator:
    """One operator of ONNX's, in its newest version that the engine runs."""

    domain: str
    op_type: str
    version: int
    inputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]
    outputs: tuple[Tensor, ...]

    @cached_property
    def name(self) -> str:
        """What torch calls it; one of Microsoft's that ONNX has another of is told apart."""
        name = snake_case(self.op_type)
        return f"microsoft_{name}" if self.domain and self.op_type in _plain() else name

    @property
    def usual(self) -> int:
        """How many results a call gives that does not say: those that every node has."""
        return max(1, sum(t.kind == "required" for t in self.outputs))

    @property
    def is_random(self) -> bool:
        """Whether calls alike may differ in their results."""
        return self.op_type in _RANDOM

    def overloads(self) -> list[str]:
        """The names of torch's overloads: the default one, and that which is told the outputs."""
        if self.outputs[-1].kind == "variadic":
            return [""]
        return ["", OUTPUTS] if len(self.outputs) > self.usual else [""]

    def schema(self, overload: str = "") -> str:
        """An overload as torch declares it, without the namespace.

        >>> named("hard_sigmoid").schema()
        'hard_sigmoid(Tensor X, *, float alpha=0.2, float beta=0.5) -> Tensor'
        """
        given, result = list(self._named()), self._returned()
        if self.outputs[-1].kind == "variadic":
            given, result = [f"int {OUTPUTS}", *given], "Tensor[]"
        elif overload:
            given, result = [f"int[] {OUTPUTS}", *given], "Tensor[]"
        arguments = ", ".join([*self._positional(), *(["*", *given] if given else [])])
        return f"{self.name}{'.' if overload else ''}{overload}({arguments}) -> {result}"

    def _positional(self) -> Iterator[str]:
        for i, tensor in enumerate(self.inputs):
            if tensor.kind == "variadic":
                yield f"Tensor[] {tensor.name}"
            elif tensor.kind == "required":
                yield f"Tensor {tensor.name}"
            else:
                last = all(later.kind == "optional" for later in self.inputs[i:])
                yield f"Tensor? {tensor.name}{'=None' if last else ''}"

    def _named(self) -> Iterator[str]:
        return (attribute.declared() for attribute in self.attributes)

    def _returned(self) -> str:
        return "Tensor" if self.usual == 1 else f"({', '.join(['Tensor'] * self.usual)})"


_SPELLED = {"MatMul": "Matmul", "NBits": "Nbits", "NaN": "Nan", "MoE": "Moe", "PRelu": "Prelu", "Col2Im": "Col2im"}
_SPELLED |= {"CDist": "Cdist", "NGram": "Ngram", "SiLU": "Silu"}
_LOGIC = {"And", "Or", "Not", "Xor"}


def snake_case(op_type: str) -> str:
    """An operator's name as torch writes names; three of ONNX's are words that Python keeps for itself.

    >>> [snake_case(x) for x in ("LayerNormalization", "QLinearMatMul", "MatMulNBits", "LSTM", "IsNaN", "Not")]
    ['layer_normalization', 'qlinear_matmul', 'matmul_nbits', 'lstm', 'is_nan', 'logical_not']
    """
    if op_type in _LOGIC:
        return f"logical_{op_type.lower()}"
    for old, new in _SPELLED.items():
        op_type = op_type.replace(old, new)
    op_type = re.sub(r"^Q([A-Z])", lambda found: f"Q{found[1].lower()}", op_type)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", op_type).lower()


# What ONNX Runtime has


@cache
def operators() -> tuple[Operator, ...]:
    """Every operator whose inputs and outputs are tensors, and which ONNX Runtime runs on the CPU.

    >>> len(operators()) > 200, [x.name for x in operators() if x.op_type == "Gelu"]
    (True, ['gelu', 'microsoft_gelu'])
    """
    return tuple(_operator(schema) for schema in _schemas() if _is_expressible(schema))


@cache
def named(name: str) -> Operator:
    """The operator that torch calls so."""
    return next(x for x in operators() if x.name == name)


@cache
def opset() -> int:
    """The version of ONNX that nodes are of."""
    return find("onnxruntime").opset(torch.device("cpu"), frozenset())


@cache
def _plain() -> frozenset[str]:
    return frozenset(schema.name for schema in _schemas() if not schema.domain)


@cache
def _schemas() -> tuple[Any, ...]:
    """The newest schema of each operator that runs, ONNX's own before Microsoft's, by name."""
    engine = find("onnxruntime")
    found = engine.probe()
    if not found.installed:
        raise MissingDependency(
            f"ONNX's operators need onnxruntime: {found.reason}", hint='pip install "sardonyx[cpu]"'
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
    """Whether there is a kernel of this version, or ONNX says of which other operators it is made."""
    if schema.deprecated or schema.name in _LEFT_OUT or not (schema.domain or onnx.defs.has(schema.name)):
        return False  # ONNX Runtime has operators in ONNX's domain that ONNX does not know
    version = schema.since_version
    ranges = [versions for versions, _ in kernels.get((schema.domain, schema.name), ())]
    if any(version == x.start or (x.stop != _NO_END and version in x) for x in ranges):
        return True
    if schema.domain:
        return False
    formal: Any = onnx.defs.get_schema(schema.name, version)
    return bool(formal.has_function or formal.has_context_dependent_function)


def _is_expressible(schema: Any) -> bool:
    """Whether torch can call it: with tensors, and attributes that are numbers and words."""
    values = (*schema.inputs, *schema.outputs)
    attributes = schema.attributes.values()
    return bool(schema.inputs) and all(map(_is_tensor, values)) and all(a.type.name in _ATTRIBUTES for a in attributes)


def _is_tensor(value: Any) -> bool:
    return any(kind in _known_types() for kind in value.types)


@cache
def _known_types() -> dict[str, torch.dtype]:
    """How ONNX Runtime spells the dtypes that torch's are."""
    spelled = {}
    for dtype in ir.DataType:
        try:
            spelled[f"tensor({dtype.name.lower()})"] = dtypes.to_torch(dtype)
        except KeyError:
            continue
    return spelled


def dtype_of(spelled: str) -> torch.dtype | None:
    """A dtype as ONNX Runtime spells it: `"tensor(float)"`; None for one that torch does not share with ONNX."""
    return _known_types().get(spelled)


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
    return Tensor(name, _KINDS[value.option.name])


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
