"""Partition a graph into regions that become ONNX and nodes that stay in torch."""

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
    """One result of a call: an output of the model, an argument returned unchanged (`passed`), or a constant.

    `order` is the memory order of the axes: the ONNX output has its axes in this order, and the result is a permuted
    view. `strides` are those of a result that is not a permutation of dense memory; they may depend on sizes.
    `complex`: the output's last axis is real and imaginary part. `number`: the result is the output's single integer.
    `device`: that of the result, if the region runs on another one.
    """

    output: int | None = None
    passed: int | None = None
    order: tuple[int, ...] | None = None
    strides: Dims | None = None
    complex: bool = False
    number: bool = False
    constant: Any = None
    device: torch.device | None = None


@dataclass(frozen=True)
class Region:
    """A graph that ONNX can express completely."""

    graph: torch.fx.GraphModule
    weights: frozenset[int]
    """Placeholders that are parameters or buffers: nearly always the same tensors."""
    device: torch.device
    outputs: tuple[torch.fx.Node, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    results: tuple[Result, ...]
    single: bool = False
    """Whether the region returns a bare value instead of a sequence."""


def region_of(graph: torch.fx.GraphModule, weights: frozenset[int]) -> Region | None:
    """Return the whole graph as a region; None if it returns what ONNX cannot, such as a symbolic number."""
    placeholders = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    returned: Any = graph.graph.output_node().args[0]
    device = device_of(graph)
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
            elsewhere = None if val.device == device else val.device
            layout = layout_of(val), strides_to_restore(val), val.dtype.is_complex
            results.append(Result(slot, None, *layout, device=elsewhere))
        elif isinstance(node, torch.fx.Node) and _is_loop_integer(node):
            results.append(Result(outputs.setdefault(node, len(outputs)), number=True))
        else:
            return None
    orders = tuple(None if _is_loop_integer(node) else layout_of(node.meta["val"]) for node in outputs)
    return Region(graph, weights, device, tuple(outputs), orders, tuple(results), single)


def device_of(graph: torch.fx.GraphModule) -> torch.device:
    """Return the device of the graph: an accelerator if any of its tensors is on one."""
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
    """Whether the node is an integer that control flow returns, such as a loop counter."""
    source = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(node.meta.get("val"), torch.SymInt)
        and isinstance(source, torch.fx.Node)
        and isinstance(source.target, torch._ops.HigherOrderOperator)
    )


def copy_graph(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Return a copy of the graph, and the mapping from its nodes to the copies; metadata is shared."""
    twins: dict[torch.fx.Node, torch.fx.Node] = {}
    copy = torch.fx.Graph()
    returned = copy.graph_copy(graph.graph, twins)
    copy.output(returned).meta = dict(graph.graph.output_node().meta)
    return torch.fx.GraphModule(graph, copy), twins


def partition(
    graph: torch.fx.GraphModule,
    weights: frozenset[int],
    stays: set[torch.fx.Node],
    compile_region: Callable[[Region], Any],
) -> torch.fx.GraphModule:
    """Replace every maximal region without nodes of `stays` by its result of `compile_region`.

    Regions of views only are left to torch, for which they cost nothing.
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
                raise AssertionError(f"{call.target} returns something other than tensors")
            setattr(fused, str(call.target), compile_region(region))
    fused.recompile()
    return fused


def _move_subgraphs(fused: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    """Move the subgraphs of a region's control flow into it; fusing made them arguments."""
    part = fused.get_submodule(str(call.target))
    assert isinstance(part, torch.fx.GraphModule)
    other_args = []
    for arg, node in zip(call.args, part.graph.find_nodes(op="placeholder"), strict=True):
        assert isinstance(arg, torch.fx.Node)
        subgraph = getattr(fused, str(arg.target), None) if arg.op == "get_attr" else None
        if not isinstance(subgraph, torch.fx.GraphModule):
            other_args.append(arg)
            continue
        setattr(part, arg.name, subgraph)
        with part.graph.inserting_before(node):
            node.replace_all_uses_with(part.graph.get_attr(arg.name))
        part.graph.erase_node(node)
    call.args = tuple(other_args)
    part.recompile()


_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def torch_only_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return nodes that always run in torch, and do not count as fallbacks.

    They are checks without a result, such as that of torch.linalg for a singular matrix, and collectives.
    """
    wrapped = graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)
    checks = {n for n in wrapped if isinstance(n.args[1], torch._ops.OpOverload) and not n.args[1]._schema.returns}
    return checks | {node for node in graph.nodes if getattr(node.target, "namespace", "") in _COLLECTIVES}


def _with_getitems(stays: set[torch.fx.Node]) -> set[torch.fx.Node]:
    items = {user for node in stays for user in node.users if getattr(user.target, "__name__", "") == "getitem"}
    return stays | items


def _is_view_or_getitem(node: torch.fx.Node) -> bool:
    return is_view(node) or getattr(node.target, "__name__", "") == "getitem"
