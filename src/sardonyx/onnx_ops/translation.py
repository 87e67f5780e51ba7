"""A call in a graph that is compiled or exported: the very node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.onnx_ops.nodes import attributes_of, bound, computed, inputs_of, outputs_of, protos
from sardonyx.onnx_ops.schemas import Operator
from sardonyx.translate.builder import Builder


def translation(operator: Operator, *, listed: bool) -> Callable[..., Any]:
    """The translation of an operator, for the table; `listed` where torch has its results in a list."""

    def translate(g: Builder, /, *args: Any, **kwargs: Any) -> Any:
        if not operator.domain and operator.version > g.opset:
            since = f"{operator.op_type} is as torch.ops.ort has it since opset {operator.version}"
            raise Unsupported(f"{since}, and the model's opset is {g.opset}")
        given = bound(operator, args, kwargs)
        attributes = list(map(ir.serde.deserialize_attribute, protos(operator, attributes_of(operator, given).items())))
        wanted = outputs_of(operator, given)
        expected = dict(zip(wanted, _several(g.out), strict=True))
        has = computed(operator, wanted)
        some = dtypes.to_onnx(next(iter(expected.values())).dtype)
        types = [dtypes.to_onnx(expected[i].dtype) if i in expected else some for i in range(len(has))]
        made = g.custom_node(operator.domain, operator.op_type, inputs_of(operator, given), attributes, types)
        for i, value in enumerate(made):
            if i not in expected:
                value.name, value.type = value.name if has[i] else "", None  # without a name, it is not computed
        results = tuple(made[i] for i in wanted)
        return results if listed or len(results) > 1 else results[0]

    return translate


def _several(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]
