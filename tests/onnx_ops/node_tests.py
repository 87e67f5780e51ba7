"""ONNX's own tests of single nodes, as calls of `torch.ops.ort`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper

from sardonyx.onnx_ops.schemas import Operator, operators


@dataclass(frozen=True)
class Case:
    """A call, and what it should give."""

    name: str
    operator: Operator
    args: list[Any]
    kwargs: dict[str, Any]
    expected: list[torch.Tensor]
    same_version: bool
    """Whether the test is of the operator as we have it, and not of an earlier or later version."""

    def call(self, args: list[Any] | None = None) -> list[torch.Tensor]:
        result = getattr(torch.ops.ort, self.operator.name)(*(self.args if args is None else args), **self.kwargs)
        return [result] if isinstance(result, torch.Tensor) else list(result)


@cache
def cases() -> dict[str, list[Case]]:
    """The cases of each operator whose tensors torch has too."""
    from onnx.backend.test.case.node import collect_testcases

    known = {(x.domain, x.op_type): x for x in operators()}
    found: dict[str, list[Case]] = {x.name: [] for x in operators()}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for case in _cases(collect_testcases(None), known):
            found[case.operator.name].append(case)
    return found


def _cases(found: list[Any], known: dict[tuple[str, str], Operator]) -> Iterator[Case]:
    for test in found:
        nodes = test.model.graph.node
        operator = known.get((nodes[0].domain, nodes[0].op_type))
        if len(nodes) == 1 and operator is not None:
            try:
                given, expected = ([_tensor(x) for x in side] for side in test.data_sets[0])
            except TypeError:  # strings, sequences, dtypes that torch lacks
                continue
            feeds = dict(zip((x.name for x in test.model.graph.input), given, strict=True))
            opset = test.model.opset_import[0].version
            same = onnx.defs.get_schema(operator.op_type, opset).since_version == operator.version
            yield Case(test.name, operator, *_arguments(operator, nodes[0], feeds), expected, same)


def _tensor(value: Any) -> torch.Tensor:
    array = np.array(numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _arguments(
    operator: Operator, node: onnx.NodeProto, feeds: dict[str, torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = [feeds[name] if name else None for name in node.input]
    if operator.inputs[-1].kind == "variadic":
        first = len(operator.inputs) - 1
        args = [*args[:first], args[first:]]
    kwargs = {a.name: _value(onnx.helper.get_attribute_value(a)) for a in node.attribute}
    wanted = [i for i, name in enumerate(node.output) if name]
    if operator.outputs[-1].kind == "variadic":
        kwargs["outputs"] = len(wanted)
    elif wanted != list(range(operator.default_outputs)):
        kwargs["outputs"] = wanted
    return args, kwargs


def _value(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return value
    return value.decode() if isinstance(value, bytes) else [_value(x) for x in value]
