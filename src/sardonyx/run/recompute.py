"""Gradients of results that an engine computed: torch recomputes the forward when a backward needs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch

from sardonyx.errors import AutogradError

log = logging.getLogger(__name__)


class Recompute:
    """Recomputes outputs in torch with autograd, from the same inputs; `error` returns why it cannot, if so."""

    def __init__(self, forward: Callable[[Sequence[torch.Tensor]], Sequence[Any]], error: Callable[[], str | None]):
        self._forward, self._error = forward, error
        self._autocast = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda")]

    def attach(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Attach the outputs to the inputs in autograd's graph; an output that is an input stays the same tensor."""
        known = {id(x) for x in inputs}
        new = [index for index, output in enumerate(outputs) if id(output) not in known]
        apply: Callable[..., Sequence[torch.Tensor]] = _Function.apply
        results = list(outputs)
        for index, result in zip(new, apply(self, new, [outputs[i] for i in new], *inputs) if new else (), strict=True):
            results[index] = result
        return results

    def gradients(
        self, inputs: Sequence[torch.Tensor], needed: Sequence[bool], places: Sequence[int], grads: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs that need one."""
        error = self._error()
        if error is not None:
            raise AutogradError(
                f"the forward cannot be recomputed for its gradients: {error}",
                hint="call backward before changing the module, or put it in training mode",
            )
        _warn_once()
        create_graph = torch.is_grad_enabled()
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            # Views: hooks of the inputs run on the returned gradients, and must not run here as well.
            views = [x.view_as(x) if needs else x for x, needs in zip(inputs, needed, strict=True)]
            outputs = self._forward(views)
        pairs = [(outputs[i], g) for i, g in zip(places, grads, strict=True) if g is not None]
        pairs = [(y, g) for y, g in pairs if y.requires_grad]
        wanted = [x for x, needs in zip(views, needed, strict=True) if needs]
        if not pairs:
            return [None] * len(inputs)
        ys, gs = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(ys, wanted, gs, create_graph=create_graph, allow_unused=True))
        return [next(gradients) if needs else None for needs in needed]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, recompute: Recompute, places: Sequence[int], outputs: Sequence[torch.Tensor], *inputs: torch.Tensor
    ) -> Any:
        ctx.recompute, ctx.places = recompute, places
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(*(y for y in outputs if not (y.is_floating_point() or y.is_complex())))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = ctx.recompute.gradients(ctx.saved_tensors, ctx.needs_input_grad[3:], ctx.places, grads)
        return (None, None, None, *gradients)


@cache
def _warn_once() -> None:
    log.warning("in torch: a backward through a compiled module in eval mode; torch recomputes its forward")
