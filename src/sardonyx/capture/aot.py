"""AOTAutograd: from a graph that dynamo traced to functional graphs of ATen operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch._decomp import core_aten_decompositions
from torch._guards import TracingContext
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from sardonyx.capture import attention, strides
from sardonyx.capture.composite_ops import preserve_attention, preserve_composite_ops
from sardonyx.capture.views import is_view
from sardonyx.translate import table

GraphCompiler: TypeAlias = Callable[[torch.fx.GraphModule, Sequence[Any], str, frozenset[int]], Callable[..., Any]]

_EXCLUDED = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})
"""Operators whose decompositions break or hide tensor constants."""


def decompositions(training: bool = False, preserved: frozenset[str] = frozenset()) -> dict[Any, Callable[..., Any]]:
    """Return torch's core decompositions, except of operators that our table translates.

    Operators named in `preserved` are not decomposed either.
    """
    rules = _decompositions(training, table.revision())
    return {target: rule for target, rule in rules.items() if target.name() not in preserved} if preserved else rules


@lru_cache(2)
def _decompositions(training: bool, edits: int) -> dict[Any, Callable[..., Any]]:
    excluded = table.names() | _EXCLUDED
    core: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    rules = {target: rule for target, rule in core.items() if target.name() not in excluded}
    rules |= {target: strides.with_eager_layout(rules[target]) for target in strides.DECOMPOSED if target in rules}
    rules |= strides.DECOMPOSITIONS
    return {**rules, **attention.DECOMPOSITIONS} if training else rules


def lower(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    compile_graph: GraphCompiler,
    preserved: frozenset[str] = frozenset(),
) -> Callable[..., Any]:
    """Trace through AOTAutograd, and compile each graph by `compile_graph`, with its kind and its constant inputs.

    Operators of our table and those named in `preserved` are not decomposed.
    """

    def compiler(kind: str) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def compile_one(fx: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            return compile_graph(fx, example, kind, constant_inputs(kind))

        return compile_one

    from torch._dynamo.backends.common import aot_autograd  # takes a second to import, and exports do not need it

    training = _needs_backward(inputs)
    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=decompositions(training, preserved),
        partition_fn=_partition_joint_graph,
    )
    clone_aliases_in_branches(graph)
    with preserve_composite_ops(), nullcontext() if training else preserve_attention():
        return backend(graph, inputs)


def clone_aliases_in_branches(graph: torch.fx.GraphModule) -> None:
    """Clone results of torch.cond branches that alias an operand or another result.

    AOTAutograd refuses branches with aliasing results, since the alias depends on the predicate; eager runs them. If an
    operand or a result is edited in place afterwards, the edit of a clone would not be seen: these stay refused.
    """
    for module in graph.modules():
        nodes = list(getattr(getattr(module, "graph", None), "nodes", ()))
        for number, node in enumerate(nodes):
            if node.target is torch.ops.higher_order.cond and not _is_edited(node, nodes[number:]):
                for branch in (getattr(module, str(arg.target)) for arg in node.args[1:3]):
                    _clone_aliases(branch)


def _is_edited(cond: torch.fx.Node, following: Sequence[torch.fx.Node]) -> bool:
    """Whether an operand or a result of a torch.cond is edited in place by one of the nodes."""
    operands = [_storage(node) for node in cond.all_input_nodes]
    results = [
        x.untyped_storage()._cdata for x in tree_leaves(cond.meta["example_value"]) if isinstance(x, torch.Tensor)
    ]
    edited = [_storage(node.all_input_nodes[0]) for node in following if _edits_in_place(node)]
    return not {None, *operands, *results}.isdisjoint(edited)


def _edits_in_place(node: torch.fx.Node) -> bool:
    """Whether a node that dynamo traced edits its first operand, by the name and the arguments of what it calls."""
    if node.op not in ("call_method", "call_function") or not node.all_input_nodes:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__")
    return writes or node.target in _ASSIGNMENTS or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


_ASSIGNMENTS = frozenset(
    {
        *(operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv),
        *(operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor),
        *(operator.ilshift, operator.irshift),
    }
)


def _clone_aliases(branch: torch.fx.GraphModule) -> None:
    output = branch.graph.output_node()
    storages = {_storage(node) for node in branch.graph.find_nodes(op="placeholder")}

    def without_alias(node: torch.fx.Node) -> torch.fx.Node:
        storage = _storage(node)
        if storage is None or storage not in storages:
            storages.add(storage)
            return node
        with branch.graph.inserting_before(output):
            clone = branch.graph.call_function(torch.clone, (node,))
        clone.meta = {**node.meta, "example_value": node.meta["example_value"].clone()}
        return clone

    output.args = map_arg(output.args, without_alias)
    branch.recompile()


def _storage(node: torch.fx.Node) -> int | None:
    """Return an id of the storage of a node's example tensor; None if it is not a tensor."""
    example = node.meta.get("example_value")
    return example.untyped_storage()._cdata if isinstance(example, torch.Tensor) else None


def _needs_backward(inputs: Sequence[Any]) -> bool:
    """Whether a backward graph may be needed."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _partition_joint_graph(
    joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Partition the joint graph into forward and backward by min cut, recomputing only views and constants.

    The min cut assumes a compiler that fuses, for which recomputing pointwise operators is free; here each costs a
    kernel. Nodes that a checkpoint marks are recomputed, except random numbers, which are saved. What is recomputed has
    its operands saved, so views that the backward does not read are left out.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    views = _views_in_backward(joint.graph, kwargs["num_fwd_outputs"])
    constant: set[torch.fx.Node] = set()
    for node in (node for node in joint.graph.nodes if node.op == "call_function"):
        if _is_random(node) or (node.target is operator.getitem and _is_random(node.args[0])):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif is_view(node):
            if node in views:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        elif not all(source in constant for source in node.all_input_nodes):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        if not _is_random(node) and all(source in constant for source in node.all_input_nodes):
            constant.add(node)
    return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def _views_in_backward(joint: torch.fx.Graph, forward_outputs: int) -> set[torch.fx.Node]:
    """Return the views in the forward that nodes of the backward read, directly or as recomputed nodes do."""
    outputs: Any = joint.output_node().args[0]
    reading = set(filter(_is_tangent, joint.nodes))
    for node in joint.nodes:
        if not reading.isdisjoint(node.all_input_nodes):
            reading.add(node)
    reading.discard(joint.output_node())
    computed, read = set(outputs[forward_outputs:]), set()
    for node in reversed(joint.nodes):
        if node in reading or _is_checkpointed(node) or (node in read and is_view(node)):
            read.update(node.all_input_nodes)
        if node in computed:
            read.add(node)
    return {node for node in read if is_view(node)}


def _is_tangent(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and "tangents" in str(node.target)


def _is_checkpointed(node: torch.fx.Node) -> bool:
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def constant_inputs(kind: str) -> frozenset[int]:
    """Return the inputs of the graph being compiled that are parameters or buffers; none in training."""
    context = TracingContext.try_get()
    if kind != "inference" or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)
