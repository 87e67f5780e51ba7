"""Which nodes of a graph become one kernel: connected, and with nothing of the graph between them."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx_ir as ir

from sardonyx.errors import OptionError
from sardonyx.native.cost import Saved, saved
from sardonyx.native.lower import lower
from sardonyx.native.nests import count
from sardonyx.native.region import CannotLower, Lowering, dims_of, is_fixed
from sardonyx.native.table import FLOATS, int_of


@dataclass(frozen=True)
class Between:
    """The nodes that compute some values from others, both given by name."""

    inputs: Sequence[str]
    outputs: Sequence[str]


Choice: TypeAlias = "Literal['auto', 'all'] | Collection[str] | Callable[[ir.Node], bool] | Between"
"""Which nodes are wanted: those that win, every one that can be, those with these names, those a function says, or
those between some values. What is given by name has to be possible, or is an error."""

_SCOPES = "pkg.torch.onnx.name_scopes"


def scope(module: str) -> Callable[[ir.Node], bool]:
    """Chooses the nodes of a module of the exported model, by its name, as `encoder.layer.0`.

    Exports write into each node which modules it is from: those of this package, and those of `torch.onnx`.
    """

    def belongs(node: ir.Node) -> bool:
        *modules, _ = ast.literal_eval(node.metadata_props.get(_SCOPES, "['']"))
        return module in modules

    return belongs


FREE = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Layout that costs an engine nothing, and a kernel a copy where it begins or ends with it."""
PRODUCTS = frozenset(
    {"MatMul", "FusedMatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "MultiHeadAttention"}
)
"""What ONNX Runtime computes faster than a kernel of ours."""
_OF_ROWS = frozenset({"MatMul", "FusedMatMul", "Gemm"})
_MOST_HELD = 2**31
"""Bytes of weights that "auto" lets kernels hold."""
TURNED = "a Transpose that moves the last axis"
_TURNS = True
"""Whether "auto" takes such, which are computed in tiles; products of ONNX Runtime read transposed by themselves."""


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
    if node.op_type in PRODUCTS and not is_of_one_row(node):
        return "faster in onnxruntime"
    if turns(node) and not (_TURNS and all(use.node.op_type not in PRODUCTS for use in node.outputs[0].uses())):
        return TURNED
    return None


def is_of_one_row(node: ir.Node) -> bool:
    """Whether a node is a product of one row and of constant weights, which a kernel reads faster than others do."""
    if node.op_type not in _OF_ROWS or refusal(node) is not None or int_of(node, "transA", 0):
        return False
    row, weights = node.inputs[:2]
    assert row is not None
    assert weights is not None
    held = is_fixed(weights) and len(dims_of(weights)) == 2 and weights.dtype in FLOATS
    return held and len(dims_of(row)) > 1 and count(dims_of(row)[:-1]) == 1


def _held_twice(nodes: Sequence[ir.Node]) -> dict[ir.Node, str]:
    """Products of one row, if their weights are too large for being held by kernels and by onnxruntime too."""
    found = [node for node in nodes if is_of_one_row(node)]
    weights = {node.inputs[1] for node in found}
    held = (ir.convenience.get_const_tensor(x) for x in weights if x is not None)
    size = sum(tensor.nbytes for tensor in held if tensor is not None)
    return dict.fromkeys(found, f"{size / 1e9:.1f} GB of weights would be held twice") if size > _MOST_HELD else {}


def turns(node: ir.Node) -> bool:
    """Whether a node is a Transpose that moves the last axis."""
    if node.op_type != "Transpose":
        return False
    order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    return not order or order[-1] != len(order) - 1


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

    def between(self, nodes: Iterable[ir.Node]) -> list[int]:
        """The places of what depends on some of these nodes, and others of them on it."""
        own = before = after = 0
        for node in nodes:
            i = self.place[node]
            own, before, after = own | 1 << i, before | self.before[i], after | self.after[i]
        return list(_bits(before & after & ~own))

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


def select(graph: ir.Graph, choice: Choice = "auto", apart: Mapping[ir.Node, str] | None = None) -> Selection:
    """Gather the wanted nodes of a graph into groups. With "auto", such groups as are worth a kernel.

    Nodes that are to stay apart are given with a reason.
    """
    nodes = list(graph)
    order = _Order(nodes)
    group_of: dict[ir.Node, list[ir.Node]] = {}
    refused: dict[ir.Node, str] = {}
    apart = {**(_held_twice(nodes) if choice == "auto" else {}), **(apart or {})}
    for node in _wanted(nodes, choice):
        why = apart.get(node) or refusal(node) or (_unwise(node) if choice == "auto" else None)
        if why is not None:
            if is_by_name(choice):
                raise cannot_be(node, why)
            refused[node] = why
            continue
        group = group_of[node] = [node]
        for source in dict.fromkeys(_sources(node)):
            other = group_of.get(source)
            if other is None or other is group:
                continue
            if order.joins([*other, *group]):
                group[:0] = other
                for member in other:
                    group_of[member] = group
            elif is_by_name(choice):
                _need_nothing_between(nodes, source, node, [*other, *group])
    unique = {id(group): group for group in group_of.values()}
    groups = [sorted(group, key=order.place.__getitem__) for group in unique.values()]
    if choice == "auto":
        groups = [group for group in map(_peeled, groups) if expected(group).seconds > 0]
    return Selection(groups, refused)


def is_by_name(choice: Choice) -> bool:
    """Whether a choice says exactly what it wants."""
    return not isinstance(choice, str) and not callable(choice)


def cannot_be(node: ir.Node, why: str) -> OptionError:
    """The error about a node that was asked for and cannot be in a kernel."""
    return OptionError(
        f"{node.op_type} {node.name!r} cannot be in a kernel: {why}",
        hint="leave it out of what is selected; ONNX Runtime goes on computing it",
    )


def _need_nothing_between(nodes: Sequence[ir.Node], source: ir.Node, node: ir.Node, members: Sequence[ir.Node]) -> None:
    """Refuse to make one kernel of nodes that something else waits for and is waited for by."""
    places = _Order(nodes).between(members)
    if places:
        between = nodes[places[0]]
        raise OptionError(
            f"{source.name!r} and {node.name!r} cannot be in one kernel: {between.op_type} {between.name!r} is in the "
            "way, which needs results of the one and gives to the other",
            hint=f"select {between.name!r} too, or only one of the two",
        )


def _wanted(nodes: Sequence[ir.Node], choice: Choice) -> list[ir.Node]:
    if isinstance(choice, Between):
        return _bounded(nodes, choice)
    if callable(choice):
        return [node for node in nodes if choice(node)]
    if isinstance(choice, str):
        if choice not in ("auto", "all"):
            raise OptionError(f"select is {choice!r}", hint="use 'auto', 'all', or a list, also for a single name")
        return list(nodes)
    missing = {*choice} - {node.name for node in nodes}
    if missing:
        raise OptionError(f"the graph has no node {min(missing)!r}", hint=_near(min(missing), nodes))
    return [node for node in nodes if node.name in choice]


def _near(name: str, nodes: Sequence[ir.Node]) -> str:
    near = difflib.get_close_matches(name, [str(node.name) for node in nodes], n=1)
    return f"did you mean {near[0]!r}?" if near else "a region between values is given by inputs= and outputs="


def _bounded(nodes: Sequence[ir.Node], choice: Between) -> list[ir.Node]:
    """What computes the outputs from the inputs, and from nothing else that changes."""
    values = {x.name: x for node in nodes for x in (*node.inputs, *node.outputs) if x is not None}
    for name in (*choice.inputs, *choice.outputs):
        if name not in values:
            raise OptionError(f"the graph has no value {name!r}", hint="name inputs and outputs of its nodes")
    found: set[ir.Node] = set()
    open_ends = [values[name] for name in choice.outputs]
    while open_ends:
        value = open_ends.pop()
        source = value.producer()
        if value.name in choice.inputs or source in found or value.is_initializer():
            continue
        if source is None or source.graph is not nodes[0].graph:
            raise OptionError(f"what is selected also reads {value.name!r}", hint="name it in inputs= too")
        if source.op_type != "Constant":
            found.add(source)
            open_ends += [x for x in source.inputs if x is not None]
    bounded = [node for node in nodes if node in found]
    if not bounded:
        raise OptionError(
            "nothing lies between the inputs and the outputs that bound a region",
            hint="outputs= names what nodes give that depend on inputs=",
        )
    _need_nothing_between(nodes, bounded[0], bounded[-1], bounded)
    return bounded


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


def expected(group: Sequence[ir.Node]) -> Saved:
    """What a kernel in the place of a group is expected to save."""
    return saved(group, [x for node in group if is_of_one_row(node) and (x := node.inputs[1]) is not None])
