"""Which nodes of a graph become one kernel: connected, and with nothing of the graph between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx_ir as ir

from sardonyx.native.lower import LAYOUT, lower
from sardonyx.native.nests import count
from sardonyx.native.region import CannotLower, Lowering, dims_of

Choice: TypeAlias = "Literal['auto', 'all'] | Collection[str] | Callable[[ir.Node], bool]"
"""Which nodes are wanted: those that win, every one that can be, those with these names, or those a function says."""

FREE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Layout that costs an engine nothing, and a kernel a copy where it begins or ends with it."""
_ALONE = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
"""Single operators whose kernels in ONNX Runtime are slow."""


def refusal(node: ir.Node) -> str | None:
    """Why a node cannot be in a kernel; None if it can."""
    try:
        lower(Lowering(), node)
    except CannotLower as error:
        return str(error)
    return None


def _unwise(node: ir.Node) -> str | None:
    """Why a node that could be in a kernel had better not be; None if it may."""
    if all(_is_about_sizes(output) for output in node.outputs):
        return "a few integers, as sizes are"
    if node.op_type == "Transpose":
        order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
        if not order or order[-1] != len(order) - 1:
            return "a Transpose that moves the last axis"
    return None


def _is_about_sizes(value: ir.Value) -> bool:
    size = count(dims_of(value))
    return value.dtype == ir.DataType.INT64 and isinstance(size, int) and size < 16


class _Order:
    """Who depends on whom, as sets of bits."""

    def __init__(self, nodes: Sequence[ir.Node]) -> None:
        self.place = {node: i for i, node in enumerate(nodes)}
        self.before = [0] * len(nodes)
        self.after = [0] * len(nodes)
        for i, node in enumerate(nodes):
            for source in _sources(node):
                if source in self.place:
                    j = self.place[source]
                    self.before[i] |= self.before[j] | 1 << j
        for i in reversed(range(len(nodes))):
            for source in _sources(nodes[i]):
                if source in self.place:
                    self.after[self.place[source]] |= self.after[i] | 1 << i

    def joins(self, nodes: Iterable[ir.Node]) -> bool:
        """Make nodes one, if no path leaves them and comes back; whether it was done.

        From then on what depends on one of them depends on all, so that no two groups wait for each other.
        """
        own = before = after = 0
        places = [self.place[node] for node in nodes]
        for i in places:
            own |= 1 << i
            before |= self.before[i]
            after |= self.after[i]
        before, after = before & ~own, after & ~own
        if before & after:
            return False
        for i in places:
            self.before[i], self.after[i] = before | own & ~(1 << i), after | own & ~(1 << i)
        for i in _bits(after):
            self.before[i] |= before | own
        for i in _bits(before):
            self.after[i] |= after | own
        return True


def _bits(places: int) -> Iterator[int]:
    while places:
        low = places & -places
        yield low.bit_length() - 1
        places ^= low


def _sources(node: ir.Node) -> list[ir.Node]:
    """The nodes that a node reads from, also inside its branches and loops."""
    found = [x.producer() for x in node.inputs if x is not None]
    for attribute in node.attributes.values():
        for body in _bodies(attribute):
            for inner in body.all_nodes():
                found += [x.producer() for x in inner.inputs if x is not None]
    return [source for source in found if source is not None]


def _bodies(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


@dataclass(frozen=True)
class Selection:
    """Groups of nodes, in the order of the graph, each of which may become a kernel."""

    groups: Sequence[Sequence[ir.Node]]
    refused: dict[ir.Node, str] = field(default_factory=dict)
    """Why other nodes that were wanted stay as they are."""


def select(graph: ir.Graph, choice: Choice = "auto") -> Selection:
    """Gather the wanted nodes of a graph into groups. With "auto", such groups as are worth a kernel."""
    nodes = list(graph)
    order = _Order(nodes)
    group_of: dict[ir.Node, list[ir.Node]] = {}
    refused: dict[ir.Node, str] = {}
    for node in _wanted(nodes, choice):
        why = refusal(node) or (_unwise(node) if choice == "auto" else None)
        if why is not None:
            refused[node] = why
            continue
        group = group_of[node] = [node]
        for source in dict.fromkeys(_sources(node)):
            other = group_of.get(source)
            if other is not None and other is not group and order.joins([*other, *group]):
                group[:0] = other
                for member in other:
                    group_of[member] = group
    unique = {id(group): group for group in group_of.values()}
    groups = [sorted(group, key=order.place.__getitem__) for group in unique.values()]
    if choice == "auto":
        groups = [group for group in map(_peeled, groups) if is_worth_it(group)]
    return Selection(groups, refused)


def _wanted(nodes: Sequence[ir.Node], choice: Choice) -> list[ir.Node]:
    if choice in ("auto", "all"):
        return list(nodes)
    if callable(choice):
        return [node for node in nodes if choice(node)]
    assert not isinstance(choice, str), f"{choice!r} is neither 'auto' nor 'all'; give names as a list"
    missing = {*choice} - {node.name for node in nodes}
    if missing:
        raise ValueError(f"the graph has no node {sorted(missing)[0]!r}")
    return [node for node in nodes if node.name in choice]


def _peeled(group: list[ir.Node]) -> list[ir.Node]:
    """Without layout at its ends that costs nothing outside."""
    kept = set(group)
    changed = True
    while changed:
        changed = False
        for node in group:
            if node not in kept or node.op_type not in FREE:
                continue
            source = node.inputs[0]
            enters = source is None or source.producer() not in kept
            leaves = all(use.node not in kept for output in node.outputs for use in output.uses())
            if enters or leaves:
                kept.remove(node)
                changed = True
    return [node for node in group if node in kept]


def is_worth_it(group: Sequence[ir.Node]) -> bool:
    """Whether a kernel does enough for being one: more than a single operator that an engine has, too."""
    working = [node for node in group if node.op_type not in LAYOUT]
    return len(working) > 1 or any(node.op_type in _ALONE for node in working)
