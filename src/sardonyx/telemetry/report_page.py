"""The page of the option `report`, which is made above the stages that tell it what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sardonyx.options import Options
from sardonyx.telemetry.report import GraphReport, RegionReport

Errors = Callable[[], tuple[Mapping[str, float], float]]
"""Gives the error of each FX node, and that of the results."""


class ReportPage(Protocol):
    """What makes the page, `sardonyx.diagnose.html`."""

    def add_graph(self, options: Options, graph: GraphReport) -> None:
        """Tell of a graph too."""

    def write(self, options: Options) -> None:
        """Write the file with all that is known by now."""

    def reset(self) -> None:
        """Begin every file anew."""

    def why_not_compared(self, graph: torch.fx.GraphModule, draws: bool) -> str | None:
        """Why the values of a graph are not compare_values with PyTorch's, if they are not."""

    def compare_values(
        self, graph: torch.fx.GraphModule, args: Sequence[Any], ours: Mapping[str, torch.Tensor], results: Sequence[Any]
    ) -> tuple[Mapping[str, float], float]:
        """How far each value, and the worst of the results, is from PyTorch's."""

    def measure_region(
        self, report: RegionReport, job: Any, runner: Any, inputs: Sequence[Any], errors: Errors | str
    ) -> None:
        """Measure a region with the inputs of its first call."""

    def report_program(
        self, program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], model: Callable[..., Any] | None = None
    ) -> None:
        """Write the report on an exported program."""


_load: list[Callable[[], ReportPage]] = []
_loaded: list[ReportPage] = []


def set_loader(load: Callable[[], ReportPage]) -> None:
    """Let this load what makes the page, when it is first asked for."""
    _load[:] = [load]


def page_of(options: Options) -> ReportPage | None:
    """What makes the page, if the options ask for one."""
    if not options.report:
        return None
    if not _loaded:
        _loaded.append(_load[0]())
    return _loaded[0]


def reset() -> None:
    """Begin every page anew."""
    for page in _loaded:
        page.reset()
