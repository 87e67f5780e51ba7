"""`verify=True`: compare a graph's first call with PyTorch, and find the first node that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sardonyx.errors import VerificationError
from sardonyx.telemetry.source import source_of

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9, torch.float16: 2e-2, torch.bfloat16: 5e-2}
TOLERANCES |= {torch.complex64: TOLERANCES[torch.float32], torch.complex128: TOLERANCES[torch.float64]}
"""Tolerance of a dtype, relative to the largest magnitude; other dtypes must be equal."""


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected magnitude; infinite if shape or NaNs differ.

    >>> difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    0.0
    """
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if expected.is_complex():
        return difference(torch.view_as_real(result.resolve_conj()), torch.view_as_real(expected.resolve_conj()))
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(result, expected) else float("inf")
    result, expected = result.double(), expected.double()
    if not torch.equal(result.isfinite(), expected.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    if not finite.any():
        return 0.0
    scale = max(expected[finite].abs().max().item(), 1e-6)
    return (result[finite] - expected[finite]).abs().max().item() / scale


def close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether a result equals PyTorch's, within the tolerance of its dtype."""
    return difference(result, expected) <= TOLERANCES.get(expected.dtype, 0.0)


def verify(graph: torch.fx.GraphModule, args: Sequence[Any], results: Sequence[Any], locate: Any) -> None:
    """Raise unless the results equal what torch computes from the same arguments.

    `locate` returns the values of FX nodes by name, as our translation computes them; it is called only on failure.
    """
    expected = graph(*args)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    for index, (result, reference) in enumerate(zip(results, expected, strict=True)):
        if isinstance(reference, torch.Tensor) and not close(result, reference):
            node = _first_divergence(graph, args, locate)
            raise VerificationError(
                f"output {index} differs from PyTorch by {difference(result, reference):.2e} of its magnitude"
                + (f"; the first operator that differs is {node.target} ({node.name})" if node else ""),
                where=source_of(node) or None,
                hint="sardonyx.diagnose.bisect, or `sardonyx bisect`, says whether a rewrite rule is the cause",
            )


def _first_divergence(graph: torch.fx.GraphModule, args: Sequence[Any], locate: Any) -> torch.fx.Node | None:
    values = locate()
    recorder = _Recorder(graph, values)
    recorder.run(*args)
    return recorder.first


class _Recorder(torch.fx.Interpreter):
    """Runs the graph in torch and compares the value of every node."""

    def __init__(self, graph: torch.fx.GraphModule, ours: dict[str, torch.Tensor]) -> None:
        super().__init__(graph)
        self._ours = ours
        self.first: torch.fx.Node | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node, and compare it if none differed before."""
        result = super().run_node(n)
        ours = self._ours.get(n.name)
        if self.first is None and ours is not None and not close(ours, result):
            self.first = n
        return result
