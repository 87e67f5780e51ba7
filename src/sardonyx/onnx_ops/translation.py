"""Translate a call in a compiled or exported graph to its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.onnx_ops.nodes import (
    attribute_protos,
    attributes_of,
    bind_arguments,
    computed_outputs,
    inputs_of,
    requested_outputs,
)
from sardonyx.onnx_ops.schemas import Operator
from sardonyx.translate.builder import Builder


def translation(operator: Operator, *, as_list: bool) -> Callable[..., Any]:
    """Return the translation of an operator; `as_list` if torch returns its results as a list."""

    def translate(g: Builder, /, *args: Any, **kwargs: Any) -> Any:
        if not operator.domain and operator.version > g.opset:
            raise Unsupported(f"{operator.op_type} needs opset {operator.version}, and the model has {g.opset}")
        arguments = bind_arguments(operator, args, kwargs)
        protos = attribute_protos(operator, attributes_of(operator, arguments).items())
        attributes = [ir.serde.deserialize_attribute(proto) for proto in protos]
        requested = requested_outputs(operator, arguments)
        expected = dict(zip(requested, _several(g.out), strict=True))
        computed = computed_outputs(operator, requested)
        some = dtypes.to_onnx(next(iter(expected.values())).dtype)
        types = [dtypes.to_onnx(expected[i].dtype) if i in expected else some for i in range(len(computed))]
        values = g.custom_node(operator.domain, operator.op_type, inputs_of(operator, arguments), attributes, types)
        for i, value in enumerate(values):
            if i not in expected:
                value.type = None
                value.name = value.name if computed[i] else ""  # an output without a name is not computed
        results = tuple(values[i] for i in requested)
        return results if as_list or len(results) > 1 else results[0]

    return translate


def _several(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]
