"""The interface between the stages and the HTML report, which is implemented in a higher layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sardonyx.options import Options
from sardonyx.telemetry.report import GraphReport, RegionReport

Errors = Callable[[], tuple[Mapping[str, float], float]]
"""Returns the error of each FX node, and that of the results."""


class ReportPage(Protocol):
    """The HTML report, `sardonyx.diagnose.html`."""

    def add_graph(self, options: Options, graph: GraphReport) -> None:
        """Add a graph to the file that the options name."""

    def write(self, options: Options) -> None:
        """Write the file that the options name, with everything added so far."""

    def reset(self) -> None:
        """Forget all files."""

    def why_not_compared(self, graph: torch.fx.GraphModule, draws: bool) -> str | None:
        """Return why the values of a graph are not compared with PyTorch's; None if they are."""

    def compare_values(
        self, graph: torch.fx.GraphModule, args: Sequence[Any], ours: Mapping[str, torch.Tensor], results: Sequence[Any]
    ) -> tuple[Mapping[str, float], float]:
        """Return the error of each value, and the largest error of the results, against PyTorch."""

    def measure_region(
        self, report: RegionReport, job: Any, runner: Any, inputs: Sequence[Any], errors: Errors | str
    ) -> None:
        """Measure a region with the inputs of its first call."""

    def report_program(
        self, program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], model: Callable[..., Any] | None = None
    ) -> None:
        """Write the report of an exported program."""


_load: list[Callable[[], ReportPage]] = []
_loaded: list[ReportPage] = []


def set_loader(load: Callable[[], ReportPage]) -> None:
    """Set the function that loads the report's implementation on first use."""
    _load[:] = [load]


def page_of(options: Options) -> ReportPage | None:
    """Return the report's implementation, if the option `report` is set."""
    if not options.report:
        return None
    if not _loaded:
        _loaded.append(_load[0]())
    return _loaded[0]


def reset() -> None:
    """Forget all report files."""
    for page in _loaded:
        page.reset()
