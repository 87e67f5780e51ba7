"""Partition: which parts of a graph become ONNX, and which stay in torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from sardonyx.capture.views import is_view, layout_of, strides_to_restore
from sardonyx.sizes import Dims


@dataclass(frozen=True)
class Result:
    """One thing that a call returns: an output of the model, an argument handed back, or a constant.

    `order` is the layout in memory that the ONNX output has and torch is to see through a permutation; `strides`
    those of the rare result that is no permutation of dense memory, which may depend on sizes. `complex` says that
    the output's last axis is a pair, real and imaginary part; `number` that torch is to see the one integer it holds.
    """

    output: int | None = None
    passed: int | None = None
    order: tuple[int, ...] | None = None
    strides: Dims | None = None
    complex: bool = False
    number: bool = False
    constant: Any = None


@dataclass(frozen=True)
class Region:
    """A graph that ONNX can express whole."""

    graph: torch.fx.GraphModule
    weights: frozenset[int]
    """Which placeholders are parameters or buffers: the same tensors on every call."""
    device: torch.device
    outputs: tuple[torch.fx.Node, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    results: tuple[Result, ...]
    single: bool = False
    """Whether FX calls the region for a bare value instead of a sequence."""


def region_of(graph: torch.fx.GraphModule, weights: frozenset[int]) -> Region | None:
    """The whole graph as a region, unless it returns something that ONNX cannot (a symbolic number, say)."""
    placeholders = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    returned: Any = graph.graph.output_node().args[0]
    single = not isinstance(returned, (tuple, list))
    outputs: dict[torch.fx.Node, int] = {}
    results = []
    for node in (returned,) if single else returned:
        if node is None:
            results.append(Result())
        elif node in placeholders:
            results.append(Result(passed=placeholders[node]))
        elif isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            val = node.meta["val"]
            slot = outputs.setdefault(node, len(outputs))
            results.append(Result(slot, None, layout_of(val), strides_to_restore(val), val.dtype.is_complex))
        elif isinstance(node, torch.fx.Node) and _is_loop_integer(node):
            results.append(Result(outputs.setdefault(node, len(outputs)), number=True))
        else:
            return None
    orders = tuple(None if _is_loop_integer(node) else layout_of(node.meta["val"]) for node in outputs)
    return Region(graph, weights, device_of(graph), tuple(outputs), orders, tuple(results), single)


def device_of(graph: torch.fx.GraphModule) -> torch.device:
    """Where the graph runs: on an accelerator if any of its tensors is there."""
    values = (node.meta.get("val") for node in graph.graph.nodes)
    devices = [val.device for val in values if isinstance(val, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


class _Support(OperatorSupportBase):
    def __init__(self, stays: set[torch.fx.Node]) -> None:
        self._stays = stays

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: torch.fx.Node) -> bool:
        if node.op != "call_function" or node in self._stays:
            return False
        is_control = isinstance(node.target, torch._ops.HigherOrderOperator)
        return is_control or _is_loop_integer(node) or _is_tensor_like(node.meta.get("val"))


def _is_tensor_like(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return bool(val) and all(item is None or isinstance(item, torch.Tensor) for item in val)
    return isinstance(val, torch.Tensor)


def _is_loop_integer(node: torch.fx.Node) -> bool:
    """Whether the node is an integer that control flow computes, as a loop that counts its rounds does."""
    source = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(node.meta.get("val"), torch.SymInt)
        and isinstance(source, torch.fx.Node)
        and isinstance(source.target, torch._ops.HigherOrderOperator)
    )


def copy_graph(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """A copy to be cut up, and which of its nodes is which; what nodes are said to be is shared."""
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    made = torch.fx.Graph()
    returned = made.graph_copy(graph.graph, twins)
    made.output(returned).meta = dict(graph.graph.output_node().meta)
    return torch.fx.GraphModule(graph, made), twins


def partition(
    graph: torch.fx.GraphModule,
    weights: frozenset[int],
    stays: set[torch.fx.Node],
    compile_region: Callable[[Region], Any],
) -> torch.fx.GraphModule:
    """Replace every maximal part that avoids `stays` by what `compile_region` makes of it.

    Parts that only look at tensors in another way are left alone: torch does that for free.
    """
    partitioner = CapabilityBasedPartitioner(graph, _Support(_with_getitems(stays)), allows_single_node_partition=True)
    parts = [part for part in partitioner.propose_partitions() if not all(map(_is_view_or_getitem, part.nodes))]
    fused = partitioner.fuse_partitions(parts, prefix="onnx_")
    fixed = {node for i, node in enumerate(fused.graph.find_nodes(op="placeholder")) if i in weights}
    for call in list(fused.graph.nodes):
        if call.op == "call_module" and str(call.target).startswith("onnx_"):
            _move_subgraphs(fused, call)
            inner = frozenset(i for i, arg in enumerate(call.args) if arg in fixed)
            region = region_of(getattr(fused, str(call.target)), inner)
            if region is None:
                raise AssertionError(f"{call.target} returns more than tensors")
            setattr(fused, str(call.target), compile_region(region))
    fused.recompile()
    return fused


def _move_subgraphs(fused: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    """Move the subgraphs of a part's control flow, which fusing made arguments of it, into the part."""
    part = fused.get_submodule(str(call.target))
    assert isinstance(part, torch.fx.GraphModule)
    kept = []
    for arg, node in zip(call.args, part.graph.find_nodes(op="placeholder"), strict=True):
        assert isinstance(arg, torch.fx.Node)
        held = getattr(fused, str(arg.target), None) if arg.op == "get_attr" else None
        if not isinstance(held, torch.fx.GraphModule):
            kept.append(arg)
            continue
        setattr(part, arg.name, held)
        with part.graph.inserting_before(node):
            node.replace_all_uses_with(part.graph.get_attr(arg.name))
        part.graph.erase_node(node)
    call.args = tuple(kept)
    part.recompile()


_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def torch_only_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes that are torch's affair, so that leaving them to it is no fallback.

    They compute nothing and may raise, as torch.linalg's do for a singular matrix; or they talk to other processes.
    """
    wrapped = graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    checks = {n for n in wrapped if isinstance(n.args[1], torch._ops.OpOverload) and not n.args[1]._schema.returns}
    return checks | {node for node in graph.nodes if getattr(node.target, "namespace", "") in _COLLECTIVES}


def _with_getitems(stays: set[torch.fx.Node]) -> set[torch.fx.Node]:
    items = {user for node in stays for user in node.users if getattr(user.target, "__name__", "") == "getitem"}
    return stays | items


def _is_view_or_getitem(node: torch.fx.Node) -> bool:
    return is_view(node) or getattr(node.target, "__name__", "") == "getitem"
