"""An operator in ONNX: the schema that checkers and shape inference read, and its translation from torch."""

from __future__ import annotations

import atexit
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Optional

import onnx
import onnx_ir as ir
import sympy
import torch
from onnx.defs import OpSchema
from torch.utils._pytree import tree_leaves

from sardonyx import dtypes
from sardonyx.customop.in_torch import bound, choice_of
from sardonyx.customop.shapes import CannotTell, ShapeRule, Unknown
from sardonyx.customop.signature import Attribute, Identity, Signature, Tensor
from sardonyx.errors import Unsupported
from sardonyx.translate.builder import Builder

_LARGEST = torch.finfo(torch.float32).max

_ATTRIBUTES: Mapping[str, tuple[OpSchema.AttrType, Callable[[str, Any], ir.Attr]]] = {
    "int": (OpSchema.AttrType.INT, lambda name, value: ir.AttrInt64(name, int(value))),
    "bool": (OpSchema.AttrType.INT, lambda name, value: ir.AttrInt64(name, int(value))),
    "float": (OpSchema.AttrType.FLOAT, lambda name, value: ir.AttrFloat32(name, float(value))),
    "str": (OpSchema.AttrType.STRING, lambda name, value: ir.AttrString(name, str(value))),
    "int[]": (OpSchema.AttrType.INTS, lambda name, value: ir.AttrInt64s(name, [int(x) for x in value])),
    "float[]": (OpSchema.AttrType.FLOATS, lambda name, value: ir.AttrFloat32s(name, [float(x) for x in value])),
}
_OPTIONS = {
    "required": OpSchema.FormalParameterOption.Single,
    "optional": OpSchema.FormalParameterOption.Optional,
    "variadic": OpSchema.FormalParameterOption.Variadic,
}


class InOnnx:
    """The schema that onnx knows of one operator, until `close`."""

    def __init__(self, signature: Signature, identity: Identity, shapes: ShapeRule, doc: str) -> None:
        self._signature, self._identity, self._shapes = signature, identity, shapes
        self.schema = OpSchema(
            identity.name,
            identity.domain,
            identity.version,
            doc,
            inputs=[self._formal(t) for t in signature.inputs],
            outputs=[self._formal(t) for t in signature.outputs],
            type_constraints=[(name, [_spelled(d) for d in given], "") for name, given in signature.types.items()],
            attributes=[_formal_attribute(a) for a in signature.attributes],
        )
        self.schema.set_type_and_shape_inference_function(self._infer)
        _let_names_meet(identity.name, identity.domain)
        onnx.defs.register_schema(self.schema)
        atexit.register(self.close)  # before onnx 1.23 a schema with a Python function crashes as the process ends

    def close(self) -> None:
        """Take it out of onnx again."""
        atexit.unregister(self.close)
        onnx.defs.deregister_schema(self._identity.name, self._identity.version, self._identity.domain)

    def _formal(self, tensor: Tensor) -> OpSchema.FormalParameter:
        kind = tensor.type if tensor.type in self._signature.types else _spelled(tensor.type)
        least = 0 if tensor.kind == "variadic" else 1
        return OpSchema.FormalParameter(tensor.name, kind, param_option=_OPTIONS[tensor.kind], min_arity=least)

    def _infer(self, context: Any) -> None:
        """Types, and sizes as far as they can be told."""
        signature = self._signature
        kinds, sizes = self._inputs(context)
        try:
            chosen = choice_of(signature, kinds)
        except TypeError as error:
            raise onnx.shape_inference.InferenceError(str(error)) from error
        shapes = self._told({**sizes, **self._given(context)})
        for i, (tensor, shape) in enumerate(zip(signature.outputs, shapes, strict=True)):
            context.set_output_type(i, _type(dtypes.to_onnx(signature.dtype_of(tensor, chosen)), shape))

    def _told(self, given: dict[str, Any]) -> Sequence[Any]:
        """What the rule says; None where it cannot tell. What it refuses is an error only where all sizes are known."""
        nothing = [None] * len(self._signature.outputs)
        if any(self._shapes.needs(t.name) and t.name not in given for t in self._signature.inputs):
            return nothing
        try:
            return self._shapes(given)
        except CannotTell:
            return nothing
        except Exception as error:
            if any(isinstance(x, Unknown) for x in tree_leaves(given)):
                return nothing
            said = str(error).removeprefix(f"{self._signature.qualified}: ")
            raise onnx.shape_inference.InferenceError(f"{self._signature.qualified}: {said}") from error

    def _inputs(self, context: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        kinds: dict[str, Any] = {}
        sizes: dict[str, Any] = {}
        inputs = self._signature.inputs
        for i, tensor in enumerate(inputs):
            last = context.get_num_inputs() if tensor.kind == "variadic" else i + 1
            types = [context.get_input_type(k) if k < context.get_num_inputs() else None for k in range(i, last)]
            kinds[tensor.name] = [_dtype(t) for t in types] if tensor.kind == "variadic" else _dtype(types[0])
            if any(t is not None and not t.tensor_type.HasField("shape") for t in types):
                continue  # a rule that asks for it cannot tell
            sizes[tensor.name] = [_sizes(t) for t in types] if tensor.kind == "variadic" else _sizes(types[0])
        return kinds, sizes

    def _given(self, context: Any) -> dict[str, Any]:
        found = {}
        for attribute in self._signature.attributes:
            given = context.get_attribute(attribute.name)
            value = attribute.default if given is None else onnx.helper.get_attribute_value(given)
            value = value.decode() if isinstance(value, bytes) else value
            found[attribute.name] = bool(value) if attribute.type == "bool" else value
        return found


_NAMES: dict[str, str] = {}
"""The domains of operators that were declared, by their names."""


def _let_names_meet(name: str, domain: str) -> None:
    """Let onnx's reference evaluator, which cannot be imported while two domains have a name, be imported before."""
    if _NAMES.setdefault(name, domain) != domain or any(onnx.defs.has(name, other) for other in _DOMAINS):
        import_module("onnx.reference.op_run")


_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training")


def _formal_attribute(attribute: Attribute) -> OpSchema.Attribute:
    kind, made = _ATTRIBUTES[attribute.type]
    if attribute.required:
        return OpSchema.Attribute(attribute.name, kind, "", required=True)
    default = ir.to_proto(made(attribute.name, attribute.default))
    return OpSchema.Attribute(attribute.name, default, "")


def _spelled(dtype: str) -> str:
    return f"tensor({dtypes.to_onnx(getattr(torch, dtype)).name.lower()})"


def _dtype(kind: Any) -> torch.dtype | None:
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.elem_type:
        return None
    return dtypes.to_torch(ir.DataType(kind.tensor_type.elem_type))


def _sizes(kind: Any) -> Any:
    if kind is None:
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else Unknown(dim.dim_param or None)
        for dim in kind.tensor_type.shape.dim
    )


def _type(dtype: ir.DataType, shape: Sequence[Any] | None) -> onnx.TypeProto:
    named = None if shape is None else [dim.name if isinstance(dim, Unknown) else dim for dim in shape]
    return onnx.helper.make_tensor_type_proto(int(dtype), named)


# Translation


def translation(signature: Signature, identity: Identity) -> Callable[..., Any]:
    """The translation to one node, for the table."""

    def translate(g: Builder, /, *args: Any, **kwargs: Any) -> Any:
        given = bound(signature, args, kwargs)
        inputs: list[ir.Value | None] = []
        for tensor in signature.inputs:
            value = given[tensor.name]
            inputs += value if tensor.kind == "variadic" else [value]
        attributes = [_attribute(a, given[a.name]) for a in signature.attributes]
        expected = g.out if isinstance(g.out, (tuple, list)) else [g.out]
        types = [dtypes.to_onnx(x.dtype) for x in expected]
        made = g.foreign(identity.domain, identity.name, inputs, attributes, types, identity.version)
        return made[0] if len(made) == 1 else made

    return translate


def _attribute(attribute: Attribute, value: Any) -> ir.Attr:
    items = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(x, (sympy.Expr, ir.Value)) and not getattr(x, "is_number", False) for x in items):
        raise Unsupported(f"its {attribute.name} depends on the inputs, and in ONNX it is an attribute, a constant")
    if attribute.type.startswith("float") and any(math.isfinite(x) and abs(x) > _LARGEST for x in map(float, items)):
        raise Unsupported(f"its {attribute.name}, {value}, is more than an attribute of ONNX, a float32, can hold")
    return _ATTRIBUTES[attribute.type][1](attribute.name, value)


def for_torch_onnx(signature: Signature, schema: OpSchema) -> Callable[..., Any]:
    """The translation as `torch.onnx.export(custom_translation_table=…)` takes it."""
    import onnxscript

    opset = onnxscript.values.Opset(schema.domain, schema.since_version)
    operator = onnxscript.values.Op(opset, schema.name, schema)

    def translate(*args: Any, **kwargs: Any) -> Any:
        given = bound(signature, args, kwargs)
        inputs = [given[t.name] for t in signature.inputs if t.kind != "variadic"]
        named = {a.name: given[a.name] for a in signature.attributes}
        # A list by its name: by position, torch's exporter puts the tensors before it into it as well.
        named |= {t.name: tuple(given[t.name]) for t in signature.inputs if t.kind == "variadic"}
        return operator(*inputs, **named)

    translate.__name__ = signature.name
    parameters = [_parameter(p, i, signature) for i, p in enumerate(signature.parameters)]
    translate.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    translate.__annotations__ = {p.name: p.annotation for p in parameters}
    return translate


_PYTHON = {"int": int, "float": float, "bool": bool, "str": str, "int[]": Sequence[int], "float[]": Sequence[float]}


def _parameter(parameter: Tensor | Attribute, index: int, signature: Signature) -> inspect.Parameter:
    keyword = index >= len(signature.parameters) - signature.keyword_only
    kind = inspect.Parameter.KEYWORD_ONLY if keyword else inspect.Parameter.POSITIONAL_OR_KEYWORD
    if isinstance(parameter, Tensor):
        import onnxscript

        tensor: Any = onnxscript.onnx_types.TensorType
        annotation = Sequence[tensor] if parameter.kind == "variadic" else tensor
        annotation = Optional[tensor] if parameter.kind == "optional" else annotation  # noqa: UP045
        default = None if signature.may_be_left_out(index) else inspect.Parameter.empty
        return inspect.Parameter(parameter.name, kind, default=default, annotation=annotation)
    default = parameter.default if signature.may_be_left_out(index) else inspect.Parameter.empty
    return inspect.Parameter(parameter.name, kind, default=default, annotation=_PYTHON[parameter.type])
