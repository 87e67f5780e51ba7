"""Select groups of nodes that become kernels: connected and convex."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

import onnx_ir as ir

from sardonyx.errors import OptionError
from sardonyx.native.cost import Savings, elements_of, estimate_savings
from sardonyx.native.lower import lower
from sardonyx.native.nests import count
from sardonyx.native.region import CannotLower, Lowering, constant_of, dims_of, is_constant
from sardonyx.native.table import FLOATS, INTEGERS, int_of
from sardonyx.optimize.integers import is_computed_in_integers
from sardonyx.telemetry.graph_snapshot import parse_list


@dataclass(frozen=True)
class BoundedRegion:
    """The nodes that compute some values from others, both by name."""

    inputs: Sequence[str]
    outputs: Sequence[str]


Choice: TypeAlias = "Literal['auto', 'all'] | Collection[str] | Callable[[ir.Node], bool] | BoundedRegion"
"""The selected nodes: those expected to be faster, all that can be lowered, those with these names, those that satisfy
a predicate, or those between some values. A node selected by name that cannot be lowered is an error."""

_SCOPES = "pkg.torch.onnx.name_scopes"


def scope(module: str) -> Callable[[ir.Node], bool]:
    """Select the nodes of a module of the exported model by name, such as `encoder.layer.0`.

    Exports of this package and of `torch.onnx` record the modules of each node.
    """

    def belongs(node: ir.Node) -> bool:
        return module in parse_list(node.metadata_props.get(_SCOPES, ""))[:-1]

    return belongs


FREE_LAYOUT = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Layout operators that are free in an engine, and cost a kernel a copy at its start or end."""
PRODUCTS = frozenset(
    {"MatMul", "FusedMatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "MultiHeadAttention"}
)
"""Operators that ONNX Runtime computes faster than our kernels."""
_MATRIX_PRODUCTS = frozenset({"MatMul", "FusedMatMul", "Gemm"})
_MAX_WEIGHT_BYTES = 2**31
"""Bytes of weights that kernels may hold with "auto"."""
MOVES_LAST_AXIS = "a Transpose that moves the last axis"
_TAKE_TRANSPOSES = True
"""Whether "auto" takes such transposes, computed in tiles; ONNX Runtime's products read transposed inputs."""


def why_not_lowerable(node: ir.Node) -> str | None:
    """Return why a node cannot be lowered, or None."""
    try:
        lower(Lowering(), node)
    except CannotLower as error:
        return str(error)
    return None


def _why_not_worthwhile(node: ir.Node) -> str | None:
    if all(_is_size_arithmetic(output) for output in node.outputs):
        return "computes sizes only"
    if is_computed_in_integers(node):
        return "onnxruntime computes it in integers"
    if node.op_type in PRODUCTS and not is_vector_product(node):
        return "faster in onnxruntime"
    if moves_last_axis(node) and not (
        _TAKE_TRANSPOSES and all(use.node.op_type not in PRODUCTS for use in node.outputs[0].uses())
    ):
        return MOVES_LAST_AXIS
    return None


def is_vector_product(node: ir.Node) -> bool:
    """Return whether a node is a product of one row and constant weights, which kernels compute faster."""
    if node.op_type not in _MATRIX_PRODUCTS or why_not_lowerable(node) is not None or int_of(node, "transA", 0):
        return False
    row, weights = node.inputs[:2]
    assert row is not None
    assert weights is not None
    constant_weights = is_constant(weights) and len(dims_of(weights)) == 2 and weights.dtype in FLOATS
    return constant_weights and len(dims_of(row)) > 1 and count(dims_of(row)[:-1]) == 1


def _weights_too_large(nodes: Sequence[ir.Node]) -> dict[ir.Node, str]:
    """Return products of one row, if their weights are too large to be held by kernels and onnxruntime both."""
    products = [node for node in nodes if is_vector_product(node)]
    weights = {node.inputs[1] for node in products}
    tensors = (ir.convenience.get_const_tensor(x) for x in weights if x is not None)
    size = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return (
        dict.fromkeys(products, f"{size / 1e9:.1f} GB of weights would be held twice")
        if size > _MAX_WEIGHT_BYTES
        else {}
    )


def moves_last_axis(node: ir.Node) -> bool:
    """Return whether a node is a Transpose that moves the last axis."""
    if node.op_type != "Transpose":
        return False
    permutation = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    return not permutation or permutation[-1] != len(permutation) - 1


def is_narrow(node: ir.Node) -> bool:
    """Return whether the last axis of a result is short: the elements of an image with few channels, by channel."""
    size = dims_of(node.outputs[0])[-1]
    return isinstance(size, int) and size <= _FEW_CHANNELS


_FEW_CHANNELS = 8


def may_divide_by_zero(node: ir.Node) -> bool:
    """Return whether a node divides integers by anything but a constant without zeros."""
    if node.domain or node.op_type not in ("Div", "Mod") or node.outputs[0].dtype not in INTEGERS:
        return False
    divisor = None if node.inputs[1] is None else constant_of(node.inputs[1])
    return divisor is None or not divisor.all()


def reduces_to_few(node: ir.Node) -> bool:
    """Return whether a node reduces many elements to fewer numbers than a GPU has multiprocessors for."""
    if not node.op_type.startswith(("Reduce", "Global")) or node.inputs[0] is None or len(node.outputs) != 1:
        return False
    source, result = (elements_of(x) for x in (node.inputs[0], node.outputs[0]))
    return source >= _MANY_ELEMENTS and result < _FEW_ROWS


_MANY_ELEMENTS, _FEW_ROWS = 2**16, 128


def _is_size_arithmetic(value: ir.Value) -> bool:
    size = count(dims_of(value))
    return value.dtype == ir.DataType.INT64 and isinstance(size, int) and size < 16


class _Reachability:
    """Transitive dependencies of nodes, as bit sets."""

    def __init__(self, nodes: Sequence[ir.Node]) -> None:
        self.index = {node: i for i, node in enumerate(nodes)}
        self.before = [0] * len(nodes)
        self.after = [0] * len(nodes)
        for i, node in enumerate(nodes):
            for source in _sources(node):
                if source in self.index:
                    j = self.index[source]
                    self.before[i] |= self.before[j] | 1 << j
        for i in reversed(range(len(nodes))):
            for source in _sources(nodes[i]):
                if source in self.index:
                    self.after[self.index[source]] |= self.after[i] | 1 << i

    def between(self, nodes: Iterable[ir.Node]) -> list[int]:
        """Return the indices of nodes on paths between these nodes."""
        members = before = after = 0
        for node in nodes:
            i = self.index[node]
            members, before, after = members | 1 << i, before | self.before[i], after | self.after[i]
        return list(_bits(before & after & ~members))

    def merge(self, nodes: Iterable[ir.Node]) -> bool:
        """Merge nodes into one if no path leaves them and comes back; return whether it was done.

        Afterwards, what depends on one of them depends on all, so that groups never depend on each other in a cycle.
        """
        members = before = after = 0
        indices = [self.index[node] for node in nodes]
        for i in indices:
            members |= 1 << i
            before |= self.before[i]
            after |= self.after[i]
        before, after = before & ~members, after & ~members
        if before & after:
            return False
        for i in indices:
            self.before[i], self.after[i] = before | members & ~(1 << i), after | members & ~(1 << i)
        for i in _bits(after):
            self.before[i] |= before | members
        for i in _bits(before):
            self.after[i] |= after | members
        return True


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _sources(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that a node reads from, also in its subgraphs."""
    producers = [x.producer() for x in node.inputs if x is not None]
    for attribute in node.attributes.values():
        for body in _subgraphs(attribute):
            for inner in body.all_nodes():
                producers += [x.producer() for x in inner.inputs if x is not None]
    return [source for source in producers if source is not None]


def _subgraphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


@dataclass(frozen=True)
class Selection:
    """Groups of nodes, in graph order, each of which may become a kernel."""

    groups: Sequence[Sequence[ir.Node]]
    rejected: dict[ir.Node, str] = field(default_factory=dict)
    """Why other selected nodes are not in a group."""


def select(
    graph: ir.Graph,
    choice: Choice = "auto",
    excluded: Mapping[ir.Node, str] | None = None,
    slow_seconds: Mapping[str, float] = MappingProxyType({}),
) -> Selection:
    """Group the selected nodes of a graph; with "auto", only groups expected to be faster.

    `excluded` has nodes to leave out, with reasons.
    """
    nodes = list(graph)
    reachability = _Reachability(nodes)
    group_of: dict[ir.Node, list[ir.Node]] = {}
    rejected: dict[ir.Node, str] = {}
    excluded = {**(_weights_too_large(nodes) if choice == "auto" else {}), **(excluded or {})}
    for node in _selected_nodes(nodes, choice):
        reason = (
            excluded.get(node) or why_not_lowerable(node) or (_why_not_worthwhile(node) if choice == "auto" else None)
        )
        if reason is not None:
            if is_by_name(choice):
                raise not_lowerable_error(node, reason)
            rejected[node] = reason
            continue
        group = group_of[node] = [node]
        for source in dict.fromkeys(_sources(node)):
            other = group_of.get(source)
            if other is None or other is group:
                continue
            if reachability.merge([*other, *group]):
                group[:0] = other
                for member in other:
                    group_of[member] = group
            elif is_by_name(choice):
                _check_convex(nodes, source, node, [*other, *group])
    unique = {id(group): group for group in group_of.values()}
    groups = [sorted(group, key=reachability.index.__getitem__) for group in unique.values()]
    if choice == "auto":
        groups = [g for g in map(_strip_free_layout, groups) if expected_savings(g, slow_seconds).seconds > 0]
    return Selection(groups, rejected)


def is_by_name(choice: Choice) -> bool:
    """Return whether a choice names nodes or values exactly."""
    return not isinstance(choice, str) and not callable(choice)


def not_lowerable_error(node: ir.Node, reason: str) -> OptionError:
    """Return the error for a selected node that cannot be in a kernel."""
    return OptionError(
        f"{node.op_type} {node.name!r} cannot be in a kernel: {reason}",
        hint="do not select it; ONNX Runtime computes it then",
    )


def _check_convex(nodes: Sequence[ir.Node], source: ir.Node, node: ir.Node, members: Sequence[ir.Node]) -> None:
    """Raise an error if nodes outside depend on some of the members while others depend on them."""
    indices = _Reachability(nodes).between(members)
    if indices:
        between = nodes[indices[0]]
        raise OptionError(
            f"{source.name!r} and {node.name!r} cannot be in one kernel: {between.op_type} {between.name!r} is "
            "between them",
            hint=f"select {between.name!r} too, or only one of the two",
        )


def _selected_nodes(nodes: Sequence[ir.Node], choice: Choice) -> list[ir.Node]:
    if isinstance(choice, BoundedRegion):
        return _nodes_between(nodes, choice)
    if callable(choice):
        return [node for node in nodes if choice(node)]
    if isinstance(choice, str):
        if choice not in ("auto", "all"):
            raise OptionError(f"select is {choice!r}", hint="use 'auto', 'all', or a list of names")
        return list(nodes)
    missing = {*choice} - {node.name for node in nodes}
    if missing:
        raise OptionError(f"the graph has no node {min(missing)!r}", hint=_suggestion(min(missing), nodes))
    return [node for node in nodes if node.name in choice]


def _suggestion(name: str, nodes: Sequence[ir.Node]) -> str:
    matches = difflib.get_close_matches(name, [str(node.name) for node in nodes], n=1)
    return f"did you mean {matches[0]!r}?" if matches else "use inputs= and outputs= for a region between values"


def _nodes_between(nodes: Sequence[ir.Node], choice: BoundedRegion) -> list[ir.Node]:
    """Return the nodes that compute the outputs from the inputs and constants only."""
    values = {x.name: x for node in nodes for x in (*node.inputs, *node.outputs) if x is not None}
    for name in (*choice.inputs, *choice.outputs):
        if name not in values:
            raise OptionError(f"the graph has no value {name!r}", hint="use names of inputs and outputs of its nodes")
    reached: set[ir.Node] = set()
    pending = [values[name] for name in choice.outputs]
    while pending:
        value = pending.pop()
        source = value.producer()
        if value.name in choice.inputs or source in reached or value.is_initializer():
            continue
        if source is None or source.graph is not nodes[0].graph:
            raise OptionError(f"the region also reads {value.name!r}", hint="add it to inputs=")
        if source.op_type != "Constant":
            reached.add(source)
            pending += [x for x in source.inputs if x is not None]
    nodes_between = [node for node in nodes if node in reached]
    if not nodes_between:
        raise OptionError(
            "no node is between inputs= and outputs=",
            hint="outputs= must be results of nodes that depend on inputs=",
        )
    _check_convex(nodes, nodes_between[0], nodes_between[-1], nodes_between)
    return nodes_between


def _strip_free_layout(group: list[ir.Node]) -> list[ir.Node]:
    kept = set(group)
    changed = True
    while changed:
        changed = False
        for node in group:
            if node not in kept or node.op_type not in FREE_LAYOUT:
                continue
            source = node.inputs[0]
            enters = source is None or source.producer() not in kept
            leaves = all(use.node not in kept for output in node.outputs for use in output.uses())
            if enters or leaves:
                kept.remove(node)
                changed = True
    return [node for node in group if node in kept]


def expected_savings(group: Sequence[ir.Node], slow_seconds: Mapping[str, float] = MappingProxyType({})) -> Savings:
    """Return the expected savings of a kernel for a group, see `estimate_savings`."""
    weights = [x for node in group if is_vector_product(node) and (x := node.inputs[1]) is not None]
    return estimate_savings(group, weights, slow_seconds)
