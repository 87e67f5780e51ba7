"""Fit a model to an engine's kernels: compute in a wider dtype, with casts, where a kernel is missing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import onnx_ir as ir

from sardonyx.optimize.cast_chains import cast_through_int64, separate_casts
from sardonyx.optimize.exact_int64 import compose_exact
from sardonyx.optimize.function_body import function_body
from sardonyx.optimize.infinities import keep_infinities
from sardonyx.optimize.lowest_masks import raise_lowest_masks
from sardonyx.optimize.signed_zeros import keep_zero_signs
from sardonyx.optimize.small_sigmoids import compose_sigmoids
from sardonyx.optimize.small_sines import compose_sines
from sardonyx.optimize.subgraphs import bodies_of, graphs_of
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
"""Dtypes that represent every value of a dtype exactly, in order of preference."""


@dataclass(frozen=True)
class Kernels:
    """The operators and dtypes that an engine implements: (domain, operator) → versions and type constraints."""

    table: Mapping[tuple[str, str], KernelTypes]
    where_loses_zero_sign: bool = False
    """Whether its Where returns 0 for a −0 from its first choice."""
    loses_infinity: frozenset[str] = frozenset()
    """Operators that return the lowest finite number as the maximum of nothing but −∞, and the same for minima."""
    pool_skips_nan: bool = False
    """Whether its MaxPool returns the largest number of a window with NaN."""
    sigmoid_loses_small: bool = False
    """Whether its Sigmoid of float32 has no relative error bound: it returns 0 for large negative numbers."""
    sine_loses_small: bool = False
    """Whether its Sin and Cos of doubles have no relative error bound near their zeros."""
    attention_drops_lowest: bool = False
    """Whether its Attention takes the lowest number in a mask for −∞."""
    joins_casts: bool = False
    """Whether it fuses two casts although the first is lossy."""
    uint8_casts_saturate: bool = False
    """Whether its Cast of a float to uint8 returns 0 for negative numbers, rather than their low bits as torch does."""
    inexact_int64: frozenset[str] = frozenset()
    """Operators whose int64 kernels do not compute in 64 bits."""
    converts_weights: bool = False
    """Whether it quantizes some weights in float32, and computes DequantizeLinear of weights at each call."""
    is_complete: bool = False
    """Whether an operator that is not in the table, and has no function body, cannot run."""

    def __hash__(self) -> int:
        return id(self)

    def accepts(self, op_type: str, opset: int, types: Mapping[str, str]) -> bool:
        """Whether a kernel supports these types, by constraint; True without any kernel: the engine may expand it."""
        kernels = self._constraints(op_type, opset)
        return not kernels or any(_satisfies(allowed, types) for allowed in kernels)

    def expands(self, op_type: str, opset: int) -> bool:
        """Whether the engine has no kernel, and runs the operator's function body instead."""
        return bool(self.table) and not self._constraints(op_type, opset)

    def _constraints(self, op_type: str, opset: int) -> list[Mapping[str, Sequence[str]]]:
        return [allowed for versions, allowed in self.table.get(("", op_type), ()) if opset in versions]


def _satisfies(allowed: Mapping[str, Sequence[str]], types: Mapping[str, str]) -> bool:
    return all(types[name] in accepted for name, accepted in allowed.items() if name in types)


def legalize(model: ir.Model, kernels: Kernels) -> Counter[str]:
    """Insert casts in place, and work around inexact kernels; return how many nodes of each operator were cast."""
    opset = model.graph.opset_imports[""]
    widened: Counter[str] = Counter()
    for graph in graphs_of(model.graph):
        widened += _legalize_graph(graph, opset, kernels)
        if kernels.where_loses_zero_sign:
            keep_zero_signs(graph)
    compose_exact(model, kernels.inexact_int64)
    if kernels.loses_infinity:
        keep_infinities(model, kernels.loses_infinity, pool_skips_nan=kernels.pool_skips_nan)
    if kernels.sigmoid_loses_small:
        compose_sigmoids(model)
    if kernels.sine_loses_small:
        compose_sines(model)
    if kernels.attention_drops_lowest:
        raise_lowest_masks(model)
    if kernels.uint8_casts_saturate:
        for graph in graphs_of(model.graph):
            cast_through_int64(graph)
    if kernels.joins_casts:
        for graph in graphs_of(model.graph):
            separate_casts(graph)
    return widened


def _legalize_graph(graph: ir.Graph, opset: int, kernels: Kernels) -> Counter[str]:
    widened: Counter[str] = Counter()
    casts: dict[tuple[int, ir.DataType], ir.Value] = {}
    for node in list(graph):
        if node.domain or bodies_of(node):  # engines pass any dtype into a body
            continue
        formal = signature(node.op_type, opset)
        if formal is None:
            continue
        types = _types(node, formal)
        if types is None or _can_run(node, opset, types, kernels, formal):
            continue
        wider = _wider_types(node, opset, types, kernels, formal)
        if wider:
            _insert_casts(graph, node, formal, wider, casts)
            widened[node.op_type] += 1
            for name in wider.keys() & types.keys():
                _warn_once(types[name])
    return widened


@cache
def _warn_once(dtype: ir.DataType) -> None:
    """Warn that half precision, usually chosen for speed, is not used by the engine."""
    if dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        name = dtype.name.lower()
        log.warning("the engine lacks %s kernels and computes in float32 with casts; results remain %s", name, name)


def _types(node: ir.Node, formal: Signature) -> dict[str, ir.DataType] | None:
    """Return the dtype of each type constraint; None if one is unknown."""
    types: dict[str, ir.DataType] = {}
    for constraint, values in ((formal.of_input, node.inputs), (formal.of_output, node.outputs)):
        for index, value in enumerate(values):
            if value is None:
                continue
            if value.dtype is None:
                return None
            types.setdefault(constraint(index), value.dtype)
    return types


def _type_names(types: Mapping[str, ir.DataType]) -> dict[str, str]:
    return {name: _type_name(dtype) for name, dtype in types.items()}


def _type_name(dtype: ir.DataType) -> str:
    return f"tensor({dtype.name.lower()})"


def unsupported_reason(node: ir.Node, opset: int, kernels: Kernels | None) -> str | None:
    """Return why a node cannot run even with casts: ONNX or the engine does not support its dtypes; else None."""
    if node.domain:
        return None
    formal = signature(node.op_type, opset)
    if formal is None:
        return f"opset {opset} has no {node.op_type}"
    types = _types(node, formal)
    if types is None:
        return None
    type_names = _type_names(types)
    for name, type_name in type_names.items():
        if name in formal.allowed and type_name not in formal.allowed[name]:
            return f"ONNX's {node.op_type} does not take {types[name].name.lower()}"
    if kernels is None or _can_run(node, opset, types, kernels, formal):
        return None
    if _wider_types(node, opset, types, kernels, formal):
        return None
    return f"the engine's {node.op_type} does not take " + " and ".join(
        d.name.lower() for d in dict.fromkeys(types.values())
    )


def _can_run(node: ir.Node, opset: int, types: Mapping[str, ir.DataType], kernels: Kernels, formal: Signature) -> bool:
    """Whether the engine has a kernel for these dtypes, or one for each node of the operator's function body."""
    if not kernels.accepts(node.op_type, opset, _type_names(types)):
        return False
    if not kernels.expands(node.op_type, opset):
        return True
    body = function_body(node, opset, formal, types)
    return bool(body or not kernels.is_complete) and all(_can_run_in_body(inner, opset, kernels) for inner in body)


def _can_run_in_body(node: ir.Node, opset: int, kernels: Kernels) -> bool:
    formal = signature(node.op_type, opset)
    types = None if formal is None or bodies_of(node) else _types(node, formal)
    return formal is None or types is None or _can_run(node, opset, types, kernels, formal)


def _wider_types(
    node: ir.Node, opset: int, types: Mapping[str, ir.DataType], kernels: Kernels, formal: Signature
) -> dict[str, ir.DataType] | None:
    """Return wider dtypes to compute in, the same for every operand of the unsupported dtype; None if there is none."""
    for narrow in dict.fromkeys(types.values()):
        for wide in _WIDER.get(narrow, ()):
            type_name = _type_name(wide)
            # A constraint that ONNX fixes to the unsupported dtype, as bool for Where's condition, is unchanged.
            changed = {
                n: wide for n, dtype in types.items() if dtype == narrow and type_name in formal.allowed.get(n, ())
            }
            if changed and _can_run(node, opset, {**types, **changed}, kernels, formal):
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
            if value.graph is not graph:  # the outer graph may have the same cast, and names are unique
                cast.outputs[0].name = f"{cast.outputs[0].name}_{graph.name}"
            graph.insert_before(node, cast)
            casts[id(value), to] = cast.outputs[0]
        node.replace_input_with(index, casts[id(value), to])
    for index, value in enumerate(node.outputs):
        to = wider.get(formal.of_output(index))
        if to is not None and value.dtype is not None:
            _cast_output_back(graph, node, value, to)


def _cast_output_back(graph: ir.Graph, node: ir.Node, value: ir.Value, wide: ir.DataType) -> None:
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
