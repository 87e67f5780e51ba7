"""Add what AOTAutograd lacks: retain_graph, double backward and batched gradients."""

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
    """A graph as dynamo traced it, for torch to replay; `replay_error` says why it cannot, if so."""

    graph: torch.fx.GraphModule
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    replay_error: str | None
    quiet: bool

    @classmethod
    def of(cls, graph: torch.fx.GraphModule, forward: torch.fx.GraphModule, fallback: str) -> CapturedGraph:
        """Capture the graph that AOTAutograd compiled to `forward`, with the current autocast state."""
        states = ((d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda"))
        forbidden = 'fallback="error" allows no fallback to torch' if fallback == "error" else None
        return cls(graph, tuple(states), forbidden or _graph_replay_error(graph, forward), fallback == "quiet")


def _graph_replay_error(graph: torch.fx.GraphModule, forward: torch.fx.GraphModule) -> str | None:
    """Return why replaying the graph could give other results or derivatives; None if it cannot."""
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in forward.graph.nodes):
        return "it draws random numbers"
    if any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in graph.graph.nodes):
        return "it contains control flow, a checkpoint or a custom autograd function"
    return None


@dataclass(frozen=True)
class _GraphCall:
    """One call of a graph; its autograd node saves the arguments until the backward is done."""

    captured: CapturedGraph
    args: Sequence[Any]
    versions: list[int] | None


def with_full_autograd(run: Callable[..., Any], captured: CapturedGraph) -> Callable[..., Any]:
    """Wrap a graph that AOTAutograd compiled so that its results can be differentiated as in eager.

    AOTAutograd has no graph for double backward (`create_graph`) and batched gradients (`is_grads_batched`): for those
    torch replays the graph that dynamo traced.
    """

    def call(*args: Any) -> Any:
        saved_args = args if captured.replay_error is None and torch.is_grad_enabled() else ()
        versions = _versions(saved_args)
        results = run(*args)
        node = _autograd_node(results)
        if node is not None:
            _extend_backward(type(node)._forward_cls)
            node.call = _GraphCall(captured, saved_args, versions)
        return results

    return call


def _versions(args: Sequence[Any]) -> list[int] | None:
    """Return the version counters of tensors; None if one was made in inference mode and has no counter."""
    try:
        return [arg._version for arg in args if arg.__class__ is not int]
    except RuntimeError:
        return None


def _autograd_node(results: Sequence[Any]) -> Any:
    """Return the autograd node that AOTAutograd made for the call, if any."""
    for result in results:
        if isinstance(result, torch.Tensor) and result.requires_grad:
            node = (result if result._base is None else result._base).grad_fn
            if hasattr(getattr(type(node), "_forward_cls", None), "_aot_id"):
                return node
    return None


def _extend_backward(function: Any) -> None:
    """Replace the backward of AOTAutograd's autograd function by one that also supports double and batched backward."""
    if hasattr(function, "compiled_backward"):
        return
    function.metadata.bw_donated_idxs = []  # never overwrite saved tensors: retain_graph may need them again
    function.compiled_backward = function.backward

    def backward(node: Any, *grads: Any) -> Any:
        batched = _are_batched(grads)
        if (batched or torch.is_grad_enabled()) and getattr(node, "call", None) is not None:
            return _backward_in_torch(node, grads, batched)
        results = function.compiled_backward(node, *grads)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            node.call = None
        return results

    disable: Callable[..., Any] = torch.compiler.disable
    function.backward = staticmethod(disable(backward, reason="it runs a compiled graph"))


def _are_batched(grads: Sequence[Any]) -> bool:
    first = grads[0][0] if isinstance(grads[0], list) else grads[0]
    return first is not None and torch._C._functorch.is_legacy_batchedtensor(first)


def _backward_in_torch(node: Any, grads: Sequence[Any], batched: bool) -> Sequence[Any]:
    """Compute the gradients of the arguments in torch: differentiable ones, or a batch of them."""
    function = type(node)._forward_cls
    replay_error = _call_replay_error(node)
    if replay_error is None:
        _warn_once(node.call.captured.quiet)
        return _replay(node, grads[0] if isinstance(grads[0], list) else grads)
    if batched:
        raise _autograd_error(replay_error)
    with torch.no_grad():
        results = function.compiled_backward(node, *grads)
    apply: Callable[..., Sequence[Any]] = _NotDifferentiable.apply
    return apply(replay_error, torch.empty(0, requires_grad=True), *results)


class _NotDifferentiable(torch.autograd.Function):
    """Identity on gradients that raises only when they are differentiated, not already for create_graph=True."""

    @staticmethod
    def forward(ctx: Any, replay_error: str, with_grad: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        ctx.replay_error = replay_error
        return grads

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _autograd_error(ctx.replay_error)


def _autograd_error(replay_error: str) -> AutogradError:
    return AutogradError(
        f"this backward needs torch to replay a compiled graph, which it cannot: {replay_error}",
        hint="exclude this part of the model from compilation with torch.compiler.disable",
    )


def _call_replay_error(node: Any) -> str | None:
    """Return why torch cannot replay the graph of a call with the same result; None if it can."""
    call, metadata = node.call, type(node)._forward_cls.metadata
    if call.captured.replay_error is not None:
        return str(call.captured.replay_error)
    if call.versions is None or _versions(call.args) != call.versions or metadata.num_mutated_inp_runtime_indices:
        return "an argument or a buffer was changed in place"
    if len(node.needs_input_grad) != len(call.args) or metadata.num_outputs_aliased:
        return "arguments or results share memory"
    return None


def _replay(node: Any, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    call: _GraphCall = node.call
    needed, create_graph = node.needs_input_grad, torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for device, dtype, enabled in call.captured.autocast:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        # Views: hooks of the arguments run on the returned gradients, and must not run here as well.
        inputs = [arg.view_as(arg) if needs else arg for arg, needs in zip(call.args, needed, strict=True)]
        results = call.captured.graph(*inputs)
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None and y.requires_grad]
    wanted = [x for x, needs in zip(inputs, needed, strict=True) if needs]
    outputs, tangents = [y for y, _ in pairs], [g for _, g in pairs]
    gradients = iter(torch.autograd.grad(outputs, wanted, tangents, create_graph=create_graph, allow_unused=True))
    return tuple(next(gradients) if needs else None for needs in needed)


@cache
def _warn_once(quiet: bool) -> None:
    if not quiet:
        log.warning("in torch: a backward with create_graph or is_grads_batched; it replays the captured graph")
