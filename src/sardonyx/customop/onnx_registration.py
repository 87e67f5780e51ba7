"""Register an operator in ONNX: its schema with shape inference, and its translation from torch."""

from __future__ import annotations

import atexit
import inspect
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
from sardonyx.customop.shapes import ShapeRule, UnknownSize, UnknownSizeError
from sardonyx.customop.signature import Attribute, Identity, Signature, Tensor
from sardonyx.customop.torch_registration import bind_arguments, resolve_dtypes
from sardonyx.dtypes import fits_attribute
from sardonyx.errors import Unsupported
from sardonyx.translate.builder import Builder

_ATTRIBUTES: Mapping[str, tuple[OpSchema.AttrType, Callable[[str, Any], ir.Attr]]] = {
    "int": (OpSchema.AttrType.INT, lambda name, value: ir.AttrInt64(name, int(value))),
    "bool": (OpSchema.AttrType.INT, lambda name, value: ir.AttrInt64(name, int(value))),
    "float": (OpSchema.AttrType.FLOAT, lambda name, value: ir.AttrFloat32(name, float(value))),
    "str": (OpSchema.AttrType.STRING, lambda name, value: ir.AttrString(name, str(value))),
    "int[]": (OpSchema.AttrType.INTS, lambda name, value: ir.AttrInt64s(name, [int(x) for x in value])),
    "float[]": (OpSchema.AttrType.FLOATS, lambda name, value: ir.AttrFloat32s(name, [float(x) for x in value])),
}
_ARITIES = {
    "required": OpSchema.FormalParameterOption.Single,
    "optional": OpSchema.FormalParameterOption.Optional,
    "variadic": OpSchema.FormalParameterOption.Variadic,
}


class OnnxRegistration:
    """An operator's schema, registered in onnx until `close`."""

    def __init__(self, signature: Signature, identity: Identity, shapes: ShapeRule, doc: str) -> None:
        self._signature, self._identity, self._shapes = signature, identity, shapes
        self.schema = OpSchema(
            identity.name,
            identity.domain,
            identity.version,
            doc,
            inputs=[self._schema_parameter(t) for t in signature.inputs],
            outputs=[self._schema_parameter(t) for t in signature.outputs],
            type_constraints=[
                (name, [_type_name(d) for d in allowed], "") for name, allowed in signature.types.items()
            ],
            attributes=[_schema_attribute(a) for a in signature.attributes],
        )
        self.schema.set_type_and_shape_inference_function(self._infer)
        _import_op_run(identity.name, identity.domain)
        onnx.defs.register_schema(self.schema)
        atexit.register(self.close)  # before onnx 1.23 a schema with a Python function crashes at exit

    def close(self) -> None:
        """Unregister it from onnx."""
        atexit.unregister(self.close)
        onnx.defs.deregister_schema(self._identity.name, self._identity.version, self._identity.domain)

    def _schema_parameter(self, tensor: Tensor) -> OpSchema.FormalParameter:
        kind = tensor.type if tensor.type in self._signature.types else _type_name(tensor.type)
        min_arity = 0 if tensor.kind == "variadic" else 1
        return OpSchema.FormalParameter(tensor.name, kind, param_option=_ARITIES[tensor.kind], min_arity=min_arity)

    def _infer(self, context: Any) -> None:
        """Infer types, and shapes as far as they are known."""
        signature = self._signature
        input_types, sizes = self._inputs(context)
        try:
            chosen = resolve_dtypes(signature, input_types)
        except TypeError as error:
            raise onnx.shape_inference.InferenceError(str(error)) from error
        shapes = self._infer_shapes({**sizes, **self._attribute_values(context)})
        for i, (tensor, shape) in enumerate(zip(signature.outputs, shapes, strict=True)):
            context.set_output_type(i, _type_proto(dtypes.to_onnx(signature.dtype_of(tensor, chosen)), shape))

    def _infer_shapes(self, arguments: dict[str, Any]) -> Sequence[Any]:
        """Return the shapes by the rule, None where unknown. A rule's error is raised only if all sizes are known."""
        unknown = [None] * len(self._signature.outputs)
        if any(self._shapes.needs(t.name) and t.name not in arguments for t in self._signature.inputs):
            return unknown
        try:
            return self._shapes(arguments)
        except UnknownSizeError:
            return unknown
        except Exception as error:
            if any(isinstance(x, UnknownSize) for x in tree_leaves(arguments)):
                return unknown
            message = str(error).removeprefix(f"{self._signature.qualified}: ")
            raise onnx.shape_inference.InferenceError(f"{self._signature.qualified}: {message}") from error

    def _inputs(self, context: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        input_types: dict[str, Any] = {}
        sizes: dict[str, Any] = {}
        inputs = self._signature.inputs
        for i, tensor in enumerate(inputs):
            last = context.get_num_inputs() if tensor.kind == "variadic" else i + 1
            types = [context.get_input_type(k) if k < context.get_num_inputs() else None for k in range(i, last)]
            input_types[tensor.name] = [_dtype(t) for t in types] if tensor.kind == "variadic" else _dtype(types[0])
            if any(t is not None and not t.tensor_type.HasField("shape") for t in types):
                continue  # rank unknown
            sizes[tensor.name] = [_sizes(t) for t in types] if tensor.kind == "variadic" else _sizes(types[0])
        return input_types, sizes

    def _attribute_values(self, context: Any) -> dict[str, Any]:
        values = {}
        for attribute in self._signature.attributes:
            proto = context.get_attribute(attribute.name)
            value = attribute.default if proto is None else onnx.helper.get_attribute_value(proto)
            value = value.decode() if isinstance(value, bytes) else value
            values[attribute.name] = bool(value) if attribute.type == "bool" else value
        return values


_DECLARED_DOMAINS: dict[str, str] = {}
"""Domains of declared operators, by operator name."""


def _import_op_run(name: str, domain: str) -> None:
    """Import onnx's reference evaluator before two domains share a name, since its import fails after that."""
    if _DECLARED_DOMAINS.setdefault(name, domain) != domain or any(
        onnx.defs.has(name, other) for other in _ONNX_DOMAINS
    ):
        import_module("onnx.reference.op_run")


_ONNX_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training")


def _schema_attribute(attribute: Attribute) -> OpSchema.Attribute:
    kind, make = _ATTRIBUTES[attribute.type]
    if attribute.required:
        return OpSchema.Attribute(attribute.name, kind, "", required=True)
    default = ir.to_proto(make(attribute.name, attribute.default))
    return OpSchema.Attribute(attribute.name, default, "")


def _type_name(dtype: str) -> str:
    return f"tensor({dtypes.to_onnx(getattr(torch, dtype)).name.lower()})"


def _dtype(kind: Any) -> torch.dtype | None:
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.elem_type:
        return None
    return dtypes.to_torch(ir.DataType(kind.tensor_type.elem_type))


def _sizes(kind: Any) -> Any:
    if kind is None:
        return None
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else UnknownSize(dim.dim_param or None)
        for dim in kind.tensor_type.shape.dim
    )


def _type_proto(dtype: ir.DataType, shape: Sequence[Any] | None) -> onnx.TypeProto:
    dims = None if shape is None else [dim.name if isinstance(dim, UnknownSize) else dim for dim in shape]
    return onnx.helper.make_tensor_type_proto(int(dtype), dims)


# Translation


def translation(signature: Signature, identity: Identity) -> Callable[..., Any]:
    """Return the translation to one node."""

    def translate(g: Builder, /, *args: Any, **kwargs: Any) -> Any:
        arguments = bind_arguments(signature, args, kwargs)
        inputs: list[ir.Value | None] = []
        for tensor in signature.inputs:
            value = arguments[tensor.name]
            inputs += value if tensor.kind == "variadic" else [value]
        attributes = [_attribute(a, arguments[a.name]) for a in signature.attributes]
        expected = g.out if isinstance(g.out, (tuple, list)) else [g.out]
        types = [dtypes.to_onnx(x.dtype) for x in expected]
        values = g.custom_node(identity.domain, identity.name, inputs, attributes, types, identity.version)
        return values[0] if len(values) == 1 else values

    return translate


def _attribute(attribute: Attribute, value: Any) -> ir.Attr:
    items = value if isinstance(value, (list, tuple)) else [value]
    if any(isinstance(x, (sympy.Expr, ir.Value)) and not getattr(x, "is_number", False) for x in items):
        raise Unsupported(f"its {attribute.name} depends on the inputs, and ONNX attributes are constants")
    if attribute.type.startswith("float") and not all(map(fits_attribute, map(float, items))):
        raise Unsupported(f"its {attribute.name} is {value}, which overflows a float32 attribute of ONNX")
    return _ATTRIBUTES[attribute.type][1](attribute.name, value)


def torch_onnx_translation(signature: Signature, schema: OpSchema) -> Callable[..., Any]:
    """Return the translation for `torch.onnx.export(custom_translation_table=...)`."""
    import onnxscript

    opset = onnxscript.values.Opset(schema.domain, schema.since_version)
    operator = onnxscript.values.Op(opset, schema.name, schema)

    def translate(*args: Any, **kwargs: Any) -> Any:
        arguments = bind_arguments(signature, args, kwargs)
        inputs = [arguments[t.name] for t in signature.inputs if t.kind != "variadic"]
        keywords = {a.name: arguments[a.name] for a in signature.attributes}
        # A list goes by name: by position, torch's exporter adds the preceding tensors to it.
        keywords |= {t.name: tuple(arguments[t.name]) for t in signature.inputs if t.kind == "variadic"}
        return operator(*inputs, **keywords)

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
        default = None if signature.is_optional(index) else inspect.Parameter.empty
        return inspect.Parameter(parameter.name, kind, default=default, annotation=annotation)
    default = parameter.default if signature.is_optional(index) else inspect.Parameter.empty
    return inspect.Parameter(parameter.name, kind, default=default, annotation=_PYTHON[parameter.type])
