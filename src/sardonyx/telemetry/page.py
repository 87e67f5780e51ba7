"""The page of the option `report`, which is made above the stages that tell it what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sardonyx.options import Options
from sardonyx.telemetry.report import GraphReport, RegionReport

Errors = Callable[[], tuple[Mapping[str, float], float]]
"""Gives the error of each FX node, and that of the results."""


class Page(Protocol):
    """What makes the page, `sardonyx.diagnose.html`."""

    def follow(self, options: Options, graph: GraphReport) -> None:
        """Tell of a graph too."""

    def write(self, options: Options) -> None:
        """Write the file with all that is known by now."""

    def forget(self) -> None:
        """Begin every file anew."""

    def hindrance(self, graph: torch.fx.GraphModule, draws: bool) -> str | None:
        """Why the values of a graph are not compared with PyTorch's, if they are not."""

    def compared(
        self, graph: torch.fx.GraphModule, args: Sequence[Any], ours: Mapping[str, torch.Tensor], results: Sequence[Any]
    ) -> tuple[Mapping[str, float], float]:
        """How far each value, and the worst of the results, is from PyTorch's."""

    def study(self, report: RegionReport, job: Any, runner: Any, inputs: Sequence[Any], errors: Errors | str) -> None:
        """Measure a region with the inputs of its first call."""

    def tell_program(
        self, program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], model: Callable[..., Any] | None = None
    ) -> None:
        """Write the report on an exported program."""


_load: list[Callable[[], Page]] = []
_loaded: list[Page] = []


def provide(load: Callable[[], Page]) -> None:
    """Let this load what makes the page, when it is first asked for."""
    _load[:] = [load]


def page_of(options: Options) -> Page | None:
    """What makes the page, if the options ask for one."""
    if not options.report:
        return None
    if not _loaded:
        _loaded.append(_load[0]())
    return _loaded[0]


def forget() -> None:
    """Begin every page anew."""
    for page in _loaded:
        page.forget()
