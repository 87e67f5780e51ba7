"""What autograd allows and AOTAutograd does not: a backward with the graph kept, of a backward, or of a whole batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sardonyx.errors import AutogradError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CapturedGraph:
    """A graph as dynamo traced it, for torch to run once more, and what hinders that, if anything."""

    graph: torch.fx.GraphModule
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    hindrance: str | None
    quiet: bool

    @classmethod
    def of(cls, graph: torch.fx.GraphModule, forward: torch.fx.GraphModule, fallback: str) -> CapturedGraph:
        """The graph, of which AOTAutograd made `forward`, and the state of autocast that it was traced in."""
        states = ((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda"))
        forbidden = 'fallback="error" leaves nothing to torch' if fallback == "error" else None
        return cls(graph, tuple(states), forbidden or _graph_replay_error(graph, forward), fallback == "quiet")


def _graph_replay_error(graph: torch.fx.GraphModule, forward: torch.fx.GraphModule) -> str | None:
    """Why torch cannot run the graph again with the same result and derivatives, if so."""
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in forward.graph.nodes):
        return "it draws random numbers"
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes):
        return "it holds control flow, a checkpoint or a custom function"
    return None


@dataclass(frozen=True)
class _GraphCall:
    """One call of a graph; its node in autograd's graph keeps the arguments until its backward is done."""

    captured: CapturedGraph
    args: Sequence[Any]
    versions: list[int] | None


def with_full_autograd(run: Callable[..., Any], captured: CapturedGraph) -> Callable[..., Any]:
    """A graph that AOTAutograd compiled, as a callable whose results can be differentiated as eager's can.

    The backward of a backward is not ONNX: AOTAutograd has no graph of it. torch runs what dynamo traced once more. So
    it does for a batch of gradients at once, which `is_grads_batched` asks for.
    """

    def call(*args: Any) -> Any:
        kept = args if captured.hindrance is None and torch.is_grad_enabled() else ()
        versions = _versions(kept)
        results = run(*args)
        node = _autograd_node(results)
        if node is not None:
            _extend_backward(type(node)._forward_cls)
            node.call = _GraphCall(captured, kept, versions)
        return results

    return call


def _versions(args: Sequence[Any]) -> list[int] | None:
    """Torch's counters of changes in place; None where a tensor was made in inference mode, which counts none."""
    try:
        return [arg._version for arg in args if arg.__class__ is not int]
    except RuntimeError:
        return None


def _autograd_node(results: Sequence[Any]) -> Any:
    """AOTAutograd's node for the call in autograd's graph, if it made one."""
    for result in results:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            node = (result if result._base is None else result._base).grad_fn
            if hasattr(getattr(type(node), "_forward_cls", None), "_aot_id"):
                return node
    return None


def _extend_backward(function: Any) -> None:
    """Give the autograd function that AOTAutograd made for a graph a backward for all that can be asked of one."""
    if hasattr(function, "backward_once"):
        return
    function.metadata.bw_donated_idxs = []  # saved tensors stay as they are, so a graph that is kept may use them again
    function.backward_once = function.backward

    def backward(node: Any, *grads: Any) -> Any:
        batched = _are_batched(grads)
        if (batched or torch.is_grad_enabled()) and getattr(node, "call", None) is not None:
            return _backward_in_torch(node, grads, batched)
        results = function.backward_once(node, *grads)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            node.call = None
        return results

    disable: Callable[..., Any] = torch.compiler.disable
    function.backward = staticmethod(disable(backward, reason="it runs a compiled graph"))


def _are_batched(grads: Sequence[Any]) -> bool:
    first = grads[0][0] if isinstance(grads[0], list) else grads[0]
    return first is not None and torch._C._functorch.is_legacy_batchedtensor(first)


def _backward_in_torch(node: Any, grads: Sequence[Any], batched: bool) -> Sequence[Any]:
    """The gradients of the arguments, by torch: differentiable themselves, or a batch of them."""
    function = type(node)._forward_cls
    hindrance = _call_replay_error(node)
    if hindrance is None:
        _warn_once(node.call.captured.quiet)
        return _replay(node, grads[0] if isinstance(grads[0], list) else grads)
    if batched:
        raise _autograd_error(hindrance)
    with torch.no_grad():
        found = function.backward_once(node, *grads)
    apply: Callable[..., Sequence[Any]] = _NotDifferentiable.apply
    return apply(hindrance, torch.empty(0, requires_grad=True), *found)


class _NotDifferentiable(torch.autograd.Function):
    """Gradients that raise if they are differentiated; asking for their graph alone harms nobody."""

    @staticmethod
    def forward(ctx: Any, hindrance: str, with_grad: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        ctx.hindrance = hindrance
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _autograd_error(ctx.hindrance)


def _autograd_error(hindrance: str) -> AutogradError:
    return AutogradError(
        f"torch would have to run a compiled graph again to differentiate it so, and cannot: {hindrance}",
        hint="leave this part of the model uncompiled, with torch.compiler.disable",
    )


def _call_replay_error(node: Any) -> str | None:
    """Why torch cannot run the graph of a call once more with the same result, if so."""
    call, metadata = node.call, type(node)._forward_cls.metadata
    if call.captured.hindrance is not None:
        return str(call.captured.hindrance)
    if call.versions is None or _versions(call.args) != call.versions or metadata.num_mutated_inp_runtime_indices:
        return "an argument or a buffer was changed in place"
    if len(node.needs_input_grad) != len(call.args) or metadata.num_outputs_aliased:
        return "arguments or results share memory"
    return None


def _replay(node: Any, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    call: _GraphCall = node.call
    needed, again = node.needs_input_grad, torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for device, dtype, enabled in call.captured.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        # Views: hooks of the arguments themselves are for the gradients that are returned, and run on those.
        inputs = [arg.view_as(arg) if needs else arg for arg, needs in zip(call.args, needed, strict=True)]
        results = call.captured.graph(*inputs)
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None and y.requires_grad]
    wanted = [x for x, needs in zip(inputs, needed, strict=True) if needs]
    outputs, tangents = [y for y, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, tangents, create_graph=again, allow_unused=True))
    return tuple(next(found) if needs else None for needs in needed)


@cache
def _warn_once(quiet: bool) -> None:
    if not quiet:
        log.warning("in torch: a backward with create_graph or is_grads_batched; it runs the captured graph again")
