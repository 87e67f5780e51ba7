"""Measurements for the option `report` at a region's first call: the time and the error of each node."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sardonyx.diagnose.profiling.events import Events
from sardonyx.diagnose.profiling.session import ProfiledRunner
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.registry import find as find_engine
from sardonyx.telemetry.report import RegionReport
from sardonyx.telemetry.verify import difference

log = logging.getLogger(__name__)

_WARM_UPS, _CALLS = 2, 5
_MAX_VALUE_BYTES = 2**31
"""Bytes of a graph's values up to which they are compared with PyTorch's: all of ours are in memory at once."""


def measure_region(
    report: RegionReport,
    job: Job,
    runner: Runner,
    inputs: Sequence[Any],
    errors: Callable[[], tuple[Mapping[str, float], float]] | str,
) -> None:
    """Measure a region with the inputs of its first call. Failures to measure become remarks in the report.

    `errors` returns the error of each FX node and of the results, or is the reason why there are none.
    """
    _try(report, "times of nodes", lambda: _measure_times(report, job, runner, inputs))
    if isinstance(errors, str):
        report.remarks.append(f"no errors of nodes: {errors}")
    else:
        measure = errors
        _try(report, "errors of nodes", lambda: _measure_errors(report, measure))


def _try(report: RegionReport, what: str, measure: Callable[[], None]) -> None:
    try:
        measure()
    except Exception as error:
        log.warning("the report has no %s: %s", what, error)
        report.remarks.append(f"no {what}: {error}")


def _measure_times(report: RegionReport, job: Job, runner: Runner, inputs: Sequence[Any]) -> None:
    if not find_engine(job.options.engine).takes_session_options:
        report.remarks.append(f"no times of nodes: the engine {job.options.engine!r} does not report them")
        return
    profiled = ProfiledRunner(job, runner)
    try:
        profiled.is_profiled = True
        for number in range(_WARM_UPS + _CALLS):
            if number == _WARM_UPS:
                profiled.begin()
            profiled(inputs)
        events = profiled.finish(_CALLS)
    finally:
        profiled.close()
    if events is not None:
        note_times(report, events)


def note_times(report: RegionReport, events: Events) -> None:
    """Add the times of a profile to the nodes of a report."""
    unassigned = 0.0
    for node in events.nodes:
        if node.origin is None:
            unassigned += node.seconds
        else:
            report.times[node.origin.name] = report.times.get(node.origin.name, 0.0) + node.seconds
    if unassigned:
        report.remarks.append(
            f"{unassigned * 1e3:.3g} ms of a call are in nodes that onnxruntime fused under other names"
        )


def _measure_errors(report: RegionReport, errors: Callable[[], tuple[Mapping[str, float], float]]) -> None:
    by_node, report.max_error = errors()
    report.errors = dict(by_node)


def why_not_compared(graph: torch.fx.GraphModule, draws: bool) -> str | None:
    """Return why the values of a graph are not compared with PyTorch's; None if they are."""
    if draws:
        return "it uses random numbers"
    values = (node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function")
    size = sum(int(x.numel()) * x.element_size() for x in values if _is_sized(x))
    return f"its values have {size / 1e9:.1f} GB" if size > _MAX_VALUE_BYTES else None


def _is_sized(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def compare_values(
    graph: torch.fx.GraphModule, args: Sequence[Any], ours: Mapping[str, torch.Tensor], results: Sequence[Any]
) -> tuple[Mapping[str, float], float]:
    """Return the error of each value, and the largest error of the results, against PyTorch."""
    run = _Comparison(graph, ours)
    expected = run.run(*args)
    expected = expected if isinstance(expected, (tuple, list)) else (expected,)
    pairs = [(a, b) for a, b in zip(results, expected, strict=True) if isinstance(b, torch.Tensor)]
    return run.errors, max((difference(a, b) for a, b in pairs), default=0.0)


class _Comparison(torch.fx.Interpreter):
    """Runs a graph in torch, and compares the values that are known."""

    def __init__(self, graph: torch.fx.GraphModule, ours: Mapping[str, torch.Tensor]) -> None:
        super().__init__(graph)
        self._ours, self.errors = ours, dict[str, float]()

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node, and compare it."""
        result = super().run_node(n)
        if n.name in self._ours and isinstance(result, torch.Tensor):
            producer = n.args[0] if n.target is operator.getitem else n
            assert isinstance(producer, torch.fx.Node)
            error = difference(self._ours[n.name], result)
            self.errors[producer.name] = max(error, self.errors.get(producer.name, 0.0))
        return result
