"""Casts around the holes in an engine's kernels: a dtype it lacks for an operator is computed in a wider one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import onnx_ir as ir

from sardonyx.optimize.cast_chains import separate_casts
from sardonyx.optimize.function_body import function_body
from sardonyx.optimize.infinities import keep_infinities
from sardonyx.optimize.integers import compose_exact
from sardonyx.optimize.scopes import bodies_of, graphs_of
from sardonyx.optimize.zeros import keep_zero_signs
from sardonyx.translate.schemas import Signature, signature

log = logging.getLogger(__name__)

KernelTypes: TypeAlias = Sequence[tuple[range, Mapping[str, Sequence[str]]]]

_WIDER = {
    ir.DataType.FLOAT16: (ir.DataType.FLOAT,),
    ir.DataType.BFLOAT16: (ir.DataType.FLOAT,),
    ir.DataType.DOUBLE: (),
    ir.DataType.BOOL: (ir.DataType.UINT8, ir.DataType.INT32),
    ir.DataType.INT8: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.UINT8: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.INT16: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.UINT16: (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT),
    ir.DataType.INT32: (ir.DataType.INT64, ir.DataType.DOUBLE),
    ir.DataType.UINT32: (ir.DataType.INT64, ir.DataType.DOUBLE),
}
"""What represents every value of a dtype exactly, in order of preference."""


@dataclass(frozen=True)
class Kernels:
    """Which operators an engine implements, and for which types: (domain, operator) → versions and constraints."""

    table: Mapping[tuple[str, str], KernelTypes]
    where_loses_zero_sign: bool = False
    """Whether its Where gives 0 for a −0 that it takes from its first choice."""
    max_pool_loses_infinity: bool = False
    """Whether its MaxPool gives the lowest number for a window of −∞."""
    joins_casts: bool = False
    """Whether it makes one cast of two of which the first loses something."""
    inexact_int64: frozenset[str] = frozenset()
    """Operators whose kernels for int64 do not compute in 64 bits."""

    def __hash__(self) -> int:
        return id(self)

    def accepts(self, op_type: str, opset: int, types: Mapping[str, str]) -> bool:
        """Whether some kernel takes these types, by constraint; an operator without any kernel is the engine's own
        affair (it may expand it)."""
        kernels = self._of(op_type, opset)
        return not kernels or any(_fit(allowed, types) for allowed in kernels)

    def expands(self, op_type: str, opset: int) -> bool:
        """Whether the engine, for want of a kernel, runs the body of the operator's function."""
        return bool(self.table) and not self._of(op_type, opset)

    def _of(self, op_type: str, opset: int) -> list[Mapping[str, Sequence[str]]]:
        return [allowed for versions, allowed in self.table.get(("", op_type), ()) if opset in versions]


def _fit(allowed: Mapping[str, Sequence[str]], types: Mapping[str, str]) -> bool:
    return all(types[name] in accepted for name, accepted in allowed.items() if name in types)


def legalize(model: ir.Model, kernels: Kernels) -> Counter[str]:
    """Insert casts in place, and work around inexact kernels; how many nodes of each operator needed casts."""
    opset = model.graph.opset_imports[""]
    widened: Counter[str] = Counter()
    for graph in graphs_of(model.graph):
        widened += _legalize_graph(graph, opset, kernels)
        if kernels.where_loses_zero_sign:
            keep_zero_signs(graph)
    compose_exact(model, kernels.inexact_int64)
    if kernels.max_pool_loses_infinity:
        keep_infinities(model)
    if kernels.joins_casts:
        for graph in graphs_of(model.graph):
            separate_casts(graph)
    return widened


def _legalize_graph(graph: ir.Graph, opset: int, kernels: Kernels) -> Counter[str]:
    widened: Counter[str] = Counter()
    casts: dict[tuple[int, ir.DataType], ir.Value] = {}
    for node in list(graph):
        if node.domain or bodies_of(node):  # engines hand any dtype into a body
            continue
        formal = signature(node.op_type, opset)
        if formal is None:
            continue
        types = _types(node, formal)
        if types is None or _runs(node, opset, types, kernels, formal):
            continue
        wider = _widening(node, opset, types, kernels, formal)
        if wider:
            _insert_casts(graph, node, formal, wider, casts)
            widened[node.op_type] += 1
            for name in wider.keys() & types.keys():
                _tell_once(types[name])
    return widened


@cache
def _tell_once(dtype: ir.DataType) -> None:
    """Half precision is chosen to be faster, so who chose it learns where it cannot be."""
    if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        name = dtype.name.lower()
        log.warning(
            "the engine lacks %s kernels: it computes in float32, with casts around; results stay %s", name, name
        )


def _types(node: ir.Node, formal: Signature) -> dict[str, ir.DataType] | None:
    """The dtype under each constraint; None where one is unknown."""
    types: dict[str, ir.DataType] = {}
    for constraint, values in ((formal.of_input, node.inputs), (formal.of_output, node.outputs)):
        for index, value in enumerate(values):
            if value is None:
                continue
            if value.dtype is None:
                return None
            types.setdefault(constraint(index), value.dtype)
    return types


def _named(types: Mapping[str, ir.DataType]) -> dict[str, str]:
    return {name: _spelled(dtype) for name, dtype in types.items()}


def _spelled(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


def lack(node: ir.Node, opset: int, kernels: Kernels | None) -> str | None:
    """Why a node cannot run, whatever casts are inserted: ONNX or the engine does not have it for these dtypes."""
    if node.domain:
        return None
    formal = signature(node.op_type, opset)
    if formal is None:
        return f"opset {opset} has no {node.op_type}"
    types = _types(node, formal)
    if types is None:
        return None
    named = _named(types)
    for name, spelled in named.items():
        if name in formal.allowed and spelled not in formal.allowed[name]:
            return f"ONNX's {node.op_type} does not take {types[name].name.lower()}"
    if kernels is None or _runs(node, opset, types, kernels, formal):
        return None
    if _widening(node, opset, types, kernels, formal):
        return None
    return f"the engine's {node.op_type} does not take " + " and ".join(
        d.name.lower() for d in dict.fromkeys(types.values())
    )


def _runs(node: ir.Node, opset: int, types: Mapping[str, ir.DataType], kernels: Kernels, formal: Signature) -> bool:
    """Whether the engine has a kernel for these dtypes, or one for each node of the operator's function."""
    if not kernels.accepts(node.op_type, opset, _named(types)):
        return False
    body = function_body(node, opset, formal, types) if kernels.expands(node.op_type, opset) else ()
    return all(_runs_in_body(inner, opset, kernels) for inner in body)


def _runs_in_body(node: ir.Node, opset: int, kernels: Kernels) -> bool:
    formal = signature(node.op_type, opset)
    types = None if formal is None or bodies_of(node) else _types(node, formal)
    return formal is None or types is None or _runs(node, opset, types, kernels, formal)


def _widening(
    node: ir.Node, opset: int, types: Mapping[str, ir.DataType], kernels: Kernels, formal: Signature
) -> dict[str, ir.DataType] | None:
    """The dtypes to compute in instead: the same wider one for every operand that has the lacking one."""
    for narrow in dict.fromkeys(types.values()):
        for wide in _WIDER.get(narrow, ()):
            spelled = _spelled(wide)
            # A constraint that ONNX fixes to the lacking dtype, as Where's condition is to booleans, stays.
            changed = {
                n: wide for n, dtype in types.items() if dtype == narrow and spelled in formal.allowed.get(n, ())
            }
            if changed and _runs(node, opset, {**types, **changed}, kernels, formal):
                return changed
    return None


def _insert_casts(
    graph: ir.Graph,
    node: ir.Node,
    formal: Signature,
    wider: Mapping[str, ir.DataType],
    casts: dict[tuple[int, ir.DataType], ir.Value],
) -> None:
    for index, value in enumerate(node.inputs):
        to = wider.get(formal.of_input(index)) if value is not None else None
        if to is None or value is None:
            continue
        if (id(value), to) not in casts:
            cast = _cast(value, to)
            if value.graph is not graph:  # the graph around may have such a cast too, and names are unique
                cast.outputs[0].name = f"{cast.outputs[0].name}_{graph.name}"
            graph.insert_before(node, cast)
            casts[id(value), to] = cast.outputs[0]
        node.replace_input_with(index, casts[id(value), to])
    for index, value in enumerate(node.outputs):
        to = wider.get(formal.of_output(index))
        if to is not None and value.dtype is not None:
            _narrow_again(graph, node, value, to)


def _narrow_again(graph: ir.Graph, node: ir.Node, value: ir.Value, wide: ir.DataType) -> None:
    narrow = value.dtype
    assert narrow is not None
    cast = _cast(value, narrow)
    graph.insert_after(node, cast)
    result = cast.outputs[0]
    ir.convenience.replace_all_uses_with(value, result, replace_graph_outputs=True)
    cast.replace_input_with(0, value)
    value.type = ir.TensorType(wide)


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(to))], num_outputs=1)
    output = node.outputs[0]
    output.name, output.type, output.shape = f"{value.name}_{to.name.lower()}", ir.TensorType(to), value.shape
    if "dims" in value.meta:
        output.meta["dims"] = value.meta["dims"]
    return node
