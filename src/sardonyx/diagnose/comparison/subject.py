"""What is compared: the unoptimized graph of a module or an ONNX model, and the calls to run it with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from sardonyx import dtypes
from sardonyx.capture.example import as_module, is_number, number_as_tensor
from sardonyx.capture.export import Captured
from sardonyx.errors import OptionError
from sardonyx.model_files import is_onnx
from sardonyx.telemetry.graph_snapshot import parse_list
from sardonyx.telemetry.source import source_of

Model: TypeAlias = "torch.nn.Module | Any"
"""A module, a function of tensors, or ONNX: a path, a proto, an `onnx_ir.Model` or a `Program`."""
Feeds: TypeAlias = "dict[str, torch.Tensor]"
CallArguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"

_FX_NAME = re.compile(r"%?(\w+)")


@dataclass(frozen=True)
class Place:
    """A value of the graph, and its origin in the model and the user's code."""

    key: str
    """Name of the value in the unoptimized graph."""
    operator: str
    module: str = ""
    """Path of the innermost module, as `encoder.layer.0`."""
    where: str = ""
    """Line of the user's code."""
    fx: str = ""
    """Name of the FX node."""

    def __str__(self) -> str:
        return f"{self.operator} {self.key}" + (f" in {self.module}" if self.module else "")


@dataclass
class Subject:
    """A model to run in several ways."""

    base: ir.Model
    """The unoptimized graph, with its weights in memory."""
    calls: list[Feeds]
    """Inputs by name, for each call."""
    captured: Captured | None = None
    """torch's graph, if there is a module."""
    module: Any = None
    arguments: list[CallArguments] = field(default_factory=list)
    """The module's arguments, for each call."""

    def __post_init__(self) -> None:
        self.places = _places(self.base)
        self.outputs = [str(x.name) for x in self.base.graph.outputs]
        if self.captured is not None:
            results = (*self.captured.returned, *self.captured.mutated.values())
            returned = [x for x in dict.fromkeys(results) if isinstance(x, torch.fx.Node)]
            self.fx = _fx_values(self.base, self.places, self.captured)
            self.fx |= {name: node.name for name, node in zip(self.outputs, returned, strict=True)}


def subject_of(
    model: Model,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    also: Sequence[Any] = (),
    opset: int | None = None,
    translator: str = "sardonyx",
) -> Subject:
    """Return the model and its calls; each of `also` is a tuple of arguments, a dict of keywords, or both."""
    if is_onnx(model):
        return _onnx_subject(model, args, kwargs, also)
    from sardonyx.doors.export import export

    calls: list[CallArguments] = [(tuple(args), dict(kwargs)), *(_to_call(x, args, kwargs) for x in also)]
    program = export(model, args, kwargs, examples=also, opset=opset, optimize="none", translator=translator)
    module = as_module(model)
    flatten = program.call_spec.flatten
    feeds = [dict(zip(program.inputs, map(tensor_of, flatten(*call)), strict=True)) for call in calls]
    return Subject(program.model, feeds, program.captured, module, calls)


def _to_call(call: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
    if isinstance(call, Mapping):
        return tuple(args), {**kwargs, **call}
    if isinstance(call, torch.Tensor):
        return (call,), dict(kwargs)
    if len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], Mapping):
        return call[0], dict(call[1])
    return tuple(call), dict(kwargs)


# ONNX


def _onnx_subject(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], also: Sequence[Any]) -> Subject:
    from sardonyx.doors.optimize import optimize

    base = optimize(model, optimize="none").model
    inputs = [str(x.name) for x in base.graph.inputs if not x.is_initializer()]
    first = _feeds(inputs, base, args, kwargs)
    calls = [({**first, **x},) if isinstance(x, Mapping) else _to_call(x, (), {})[0] for x in also]
    return Subject(base, [first, *(_feeds(inputs, base, call, {}) for call in calls)])


def _feeds(inputs: Sequence[str], base: ir.Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Feeds:
    """Return inputs by name, from arrays or tensors in order, by keyword, or in a dict; random if there are none."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        kwargs, args = {**args[0], **kwargs}, ()
    if not args and not kwargs and inputs:
        from sardonyx.native.measure import random_inputs

        kwargs = random_inputs(base.graph)
    values = {**dict(zip(inputs, args, strict=False)), **kwargs}
    if len(args) > len(inputs) or set(values) != set(inputs):
        raise OptionError(
            f"the model takes {', '.join(inputs)}, but got {len(args)} arguments and {', '.join(kwargs) or 'no'} names",
            hint="pass all inputs in order or by name, or none for random ones",
        )
    return {name: tensor_of(values[name]) for name in inputs}


def tensor_of(value: Any) -> torch.Tensor:
    """Convert an array, a number or a tensor to a tensor without gradient."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype == ir.DataType.BFLOAT16.numpy():
        return torch.from_numpy(value.view(np.uint16)).view(torch.bfloat16)
    return torch.as_tensor(np.array(value, order="C") if isinstance(value, np.ndarray) else [value])


# Origins of values


def _places(base: ir.Model) -> dict[str, Place]:
    return {str(x.name): _place(str(x.name), node) for node in base.graph for x in node.outputs if x.name}


def _place(key: str, node: ir.Node) -> Place:
    metadata = node.metadata_props
    scopes = parse_list(metadata.get("pkg.torch.onnx.name_scopes", ""))
    kinds = parse_list(metadata.get("pkg.torch.onnx.class_hierarchy", ""))
    fx = _FX_NAME.match(metadata.get("pkg.torch.onnx.fx_node", ""))
    module = scopes[-2] if len(scopes) > 1 else ""
    trace: Any = _NodeMeta({"stack_trace": metadata.get("pkg.torch.onnx.stack_trace", "")})
    operator = kinds[-1] if kinds else node.op_type
    return Place(key, operator, module, source_of(trace), fx[1] if fx else "")


@dataclass(frozen=True)
class _NodeMeta:
    """The part of an FX node that `source_of` reads."""

    meta: Mapping[str, str]


def _fx_values(base: ir.Model, places: Mapping[str, Place], captured: Captured) -> dict[str, str]:
    """Return the FX node of each value that equals one: the last value of its translation with the same shape."""
    nodes = {node.name: node.meta.get("val") for node in captured.graph.graph.nodes}
    names: dict[str, str] = {}
    for node in base.graph:
        for value in node.outputs:
            fx = places[str(value.name)].fx
            if isinstance(nodes.get(fx), torch.Tensor) and _matches(value, nodes[fx]):
                names[fx] = str(value.name)
    return {name: fx for fx, name in names.items()}


def _matches(value: ir.Value, val: torch.Tensor) -> bool:
    if value.dtype is None or not dtypes.is_known(val.dtype) or value.dtype != dtypes.to_onnx(val.dtype):
        return False
    rank = val.dim() + val.dtype.is_complex
    return value.shape is None or (
        len(value.shape) == rank
        and all(
            not isinstance(a, int) or isinstance(b, torch.SymInt) or a == b
            for a, b in zip(value.shape, val.shape, strict=False)
        )
    )


def leaves_of(captured: Captured, call: CallArguments) -> list[Any]:
    """Return the flattened arguments of a call, in the order of the traced graph."""
    args, kwargs = call
    names = captured.in_spec.children()[1].context
    leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in names}))
    values = [node.meta.get("val") for node in captured.graph.graph.find_nodes(op="placeholder")]
    for index, place in captured.inputs.items():
        if isinstance(values[index], torch.Tensor) and is_number(leaves[place]):
            leaves[place] = number_as_tensor(leaves[place])
    return leaves
