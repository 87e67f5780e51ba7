"""A compiled graph, as AOTAutograd calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sardonyx.run.region import CompiledRegion

BoxedCall: TypeAlias = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of arguments, and clears it so that unused tensors can be freed."""


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled graph."""

    run: BoxedCall
    region: CompiledRegion | None = None
    """The region, if the whole graph is one; None if torch runs parts of it."""

    @classmethod
    def of(cls, compiled: CompiledRegion | torch.fx.GraphModule) -> CompiledGraph:
        """Make it of one region, or of a graph that calls regions."""
        if isinstance(compiled, CompiledRegion):
            return cls(compiled.run_boxed, compiled)
        return cls(_boxed(compiled))


def _boxed(graph: torch.fx.GraphModule) -> BoxedCall:
    def run(args: list[Any]) -> Sequence[Any]:
        unboxed = tuple(args)
        args.clear()
        results: Sequence[Any] = graph(*unboxed)
        return results

    run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's convention
    return run
