"""Patterns of subgraphs: `P.Add(P.MatMul("x", "w"), "b")`, where names bind values."""

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
class Pattern:
    """A node of a pattern: an operator applied to patterns, or to names that bind values.

    A `shared` node may have other readers; any other inner node must be read by the pattern alone, so that the
    rewrite replaces it.
    """

    op_type: str
    inputs: tuple[Pattern | str | float, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    name: str | None = None
    shared: bool = False

    def matches(self, node: ir.Node, bound: Bindings) -> Iterator[Bindings]:
        """Yield every match of the node, given earlier bindings."""
        if node.op_type != self.op_type or node.domain != self.domain or not self._attributes_match(node):
            return
        if len(node.inputs) != len(self.inputs):
            return
        if self.name:
            bound = {**bound, self.name: node.outputs[0]}
        orders = permutations(node.inputs) if self.op_type in _COMMUTATIVE else (tuple(node.inputs),)
        for order in orders:
            yield from self._match_inputs(order, 0, bound, node.graph)

    def _attributes_match(self, node: ir.Node) -> bool:
        return all(
            (node.attributes[key].value if key in node.attributes else None) == value
            for key, value in self.attributes.items()
        )

    def _match_inputs(
        self, values: tuple[ir.Value | None, ...], index: int, bound: Bindings, scope: Scope
    ) -> Iterator[Bindings]:
        if index == len(values):
            yield bound
            return
        for extended in _match(self.inputs[index], values[index], bound, scope):
            yield from self._match_inputs(values, index + 1, extended, scope)


def _match(pattern: Pattern | str | float, value: ir.Value | None, bound: Bindings, scope: Scope) -> Iterator[Bindings]:
    if value is None:
        return
    if isinstance(pattern, str):
        if bound.get(pattern, value) is value:
            yield {**bound, pattern: value}
    elif isinstance(pattern, Pattern):
        producer = value.producer()
        if producer is None or producer.graph is not scope:  # a loop must not recompute an outer value
            return
        if (pattern.shared or is_private(value)) and len(producer.outputs) == 1:
            yield from pattern.matches(producer, bound)
    elif _is_number(value, pattern):
        yield bound


def _is_number(value: ir.Value, expected: float) -> bool:
    """Whether a constant equals the number: exactly, if it has few binary digits; else within its dtype's precision."""
    number = scalar_of(value)
    if number is None or (expected * 64).is_integer():
        return number == expected
    tolerance = 1e-9 if value.dtype == ir.DataType.DOUBLE else 1e-6
    return abs(number - expected) <= tolerance * abs(expected)


def is_private(value: ir.Value) -> bool:
    """Whether a single node reads the value, and the graph does not return it."""
    return not value.is_graph_output() and len({id(use.node) for use in value.uses()}) == 1


def permutation_of(transpose: ir.Node | None) -> list[int]:
    """Return the permutation of a Transpose; empty for other nodes, and if it is unknown."""
    if transpose is None or transpose.op_type != "Transpose":
        return []
    if "perm" in transpose.attributes:
        return list(transpose.attributes["perm"].as_ints())
    source = transpose.inputs[0]
    return list(reversed(range(len(source.meta.get("dims") or ())))) if source is not None else []


def scalar_of(value: ir.Value | None) -> float | None:
    """Return the number in a constant of one element; None for anything else."""
    array = array_of(value)
    return array.reshape(-1)[0].item() if array is not None and array.size == 1 else None


def array_of(value: ir.Value | None) -> Any:
    """Return the array of a constant; None for anything else, and for weights in torch, which may change."""
    tensor = value.const_value if value is not None else None
    if tensor is None or (isinstance(tensor, ir.ExternalTensor) and tensor.location == WEIGHTS_LOCATION):
        return None
    return tensor.numpy()


class _Patterns:
    """`P.Add(x, y, axis=1)` creates a pattern; `P.Add(..., _name="sum")` binds its result too."""

    def __getattr__(self, op_type: str) -> Callable[..., Pattern]:
        def make(
            *inputs: Pattern | str | float,
            _domain: str = "",
            _name: str | None = None,
            _shared: bool = False,
            **attributes: Any,
        ) -> Pattern:
            return Pattern(op_type, inputs, attributes, _domain, _name, _shared)

        return make


P = _Patterns()
