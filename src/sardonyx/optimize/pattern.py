"""Patterns: `P.Add(P.MatMul("x", "w"), "b")` is the shape of a subgraph, with names for what it binds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, TypeAlias

import onnx_ir as ir

from sardonyx.translate.translator import WEIGHTS_LOCATION

Bindings: TypeAlias = dict[str, ir.Value]
Scope: TypeAlias = "ir.Graph | ir.Function | None"
_COMMUTATIVE = {"Add", "Mul", "Max", "Min", "And", "Or"}


@dataclass(frozen=True)
class Operator:
    """A node of the pattern: an operator applied to patterns, or to names that bind values.

    A `shared` node may have other readers; any other inner node must be read by the pattern alone, so that the
    rewrite takes its place instead of standing beside it.
    """

    op_type: str
    inputs: tuple[Operator | str | float, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    name: str | None = None
    shared: bool = False

    def matches(self, node: ir.Node, bound: Bindings) -> Iterator[Bindings]:
        """Every way in which the node fits, given what is bound already."""
        if node.op_type != self.op_type or node.domain != self.domain or not self._attributes_fit(node):
            return
        if len(node.inputs) != len(self.inputs):
            return
        if self.name:
            bound = {**bound, self.name: node.outputs[0]}
        orders = permutations(node.inputs) if self.op_type in _COMMUTATIVE else (tuple(node.inputs),)
        for order in orders:
            yield from self._inputs_fit(order, 0, bound, node.graph)

    def _attributes_fit(self, node: ir.Node) -> bool:
        return all(
            (node.attributes[key].value if key in node.attributes else None) == value
            for key, value in self.attributes.items()
        )

    def _inputs_fit(
        self, values: tuple[ir.Value | None, ...], at: int, bound: Bindings, scope: Scope
    ) -> Iterator[Bindings]:
        if at == len(values):
            yield bound
            return
        for more in _fits(self.inputs[at], values[at], bound, scope):
            yield from self._inputs_fit(values, at + 1, more, scope)


def _fits(pattern: Operator | str | float, value: ir.Value | None, bound: Bindings, scope: Scope) -> Iterator[Bindings]:
    if value is None:
        return
    if isinstance(pattern, str):
        if bound.get(pattern, value) is value:
            yield {**bound, pattern: value}
    elif isinstance(pattern, Operator):
        producer = value.producer()
        if producer is None or producer.graph is not scope:  # what a loop finds around it, it must not compute anew
            return
        if (pattern.shared or is_private(value)) and len(producer.outputs) == 1:
            yield from pattern.matches(producer, bound)
    elif _is_number(value, pattern):
        yield bound


def _is_number(value: ir.Value, wanted: float) -> bool:
    """Whether a constant is the number: exactly, if that has few binary digits; else as closely as its dtype tells."""
    number = scalar_of(value)
    if number is None or (wanted * 64).is_integer():
        return number == wanted
    tolerance = 1e-9 if value.dtype == ir.DataType.DOUBLE else 1e-6
    return abs(number - wanted) <= tolerance * abs(wanted)


def is_private(value: ir.Value) -> bool:
    """Whether one node alone reads the value, and the graph does not return it."""
    return not value.is_graph_output() and len({id(use.node) for use in value.uses()}) == 1


def order_of(transpose: ir.Node | None) -> list[int]:
    """The order in which a Transpose takes its axes; nothing for other nodes, and where it is not known."""
    if transpose is None or transpose.op_type != "Transpose":
        return []
    if "perm" in transpose.attributes:
        return list(transpose.attributes["perm"].as_ints())
    source = transpose.inputs[0]
    return list(reversed(range(len(source.meta.get("dims") or ())))) if source is not None else []


def scalar_of(value: ir.Value | None) -> float | None:
    """The number a constant of one element holds; None for anything else."""
    array = array_of(value)
    return array.reshape(-1)[0].item() if array is not None and array.size == 1 else None


def array_of(value: ir.Value | None) -> Any:
    """The array a constant holds; None for anything else, and for weights that live in torch, which may change."""
    held = value.const_value if value is not None else None
    if held is None or (isinstance(held, ir.ExternalTensor) and held.location == WEIGHTS_LOCATION):
        return None
    return held.numpy()


class _Patterns:
    """`P.Add(x, y, axis=1)` makes a pattern; `P.Add(..., _name="sum")` binds its result too."""

    def __getattr__(self, op_type: str) -> Callable[..., Operator]:
        def make(
            *inputs: Operator | str | float,
            _domain: str = "",
            _name: str | None = None,
            _shared: bool = False,
            **attributes: Any,
        ) -> Operator:
            return Operator(op_type, inputs, attributes, _domain, _name, _shared)

        return make


P = _Patterns()
