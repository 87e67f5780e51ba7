"""`sardonyx.explain`: compile a model once, and report what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sardonyx.options import Options
from sardonyx.telemetry.report import Report, collecting
from sardonyx.telemetry.verify import difference


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compile a model for these arguments, run it once, compare with eager, and return a report.

    Runs without gradients. The model is not changed.

    >>> report = explain(torch.nn.Linear(4, 2).eval(), torch.ones(3, 4))
    >>> report.operators["Gemm"], report.fallbacks
    (1, [])
    """
    from sardonyx.doors.dynamo import sardonyx as backend

    chosen = Options.of(options)

    def fresh(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return backend(graph, inputs, options=chosen)

    with torch.no_grad(), unchanged(model), collecting() as report:
        result = torch.compile(model, backend=fresh, dynamic=dynamic)(*args, **kwargs)
        expected = model(*args, **kwargs)
    pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(expected), strict=True)
    report.max_error = max((difference(a, b) for a, b in pairs if isinstance(b, torch.Tensor)), default=None)
    return report


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restore the values of buffers at the end, which batch norm in training mode updates, for example."""
    before = [(b, b.clone()) for b in model.buffers()] if isinstance(model, torch.nn.Module) else []
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.copy_(value)
