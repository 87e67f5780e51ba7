"""Reports of compiled models: graphs, operators, rules, fallbacks, times."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from sardonyx.telemetry.progress import show_progress

if TYPE_CHECKING:
    from sardonyx.telemetry.graph_snapshot import GraphSnapshot

log = logging.getLogger(__name__)

R = TypeVar("R")

_MINOR_PASSES = (
    "widen",
    "weights",
    "legalize",
    "guard_empty",
    "drop_unused",
    "reshapes",
    "caches",
    "functions",
    "names",
)
"""Fast passes: they are in `seconds`, but not in the text of a report."""


@dataclass(frozen=True)
class Fallback:
    """An operator that torch runs, because ONNX or the engine cannot."""

    operator: str
    reason: str
    where: str

    def __str__(self) -> str:
        return f"{self.operator}: {self.reason}" + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Choice:
    """The engine that `auto` chose, and why: the seconds of a call with each, and the engines it discarded."""

    engine: str
    seconds: Mapping[str, float]
    discarded: Mapping[str, str]
    remembered: bool = False

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.discarded.items())
        how = "measured before" if self.remembered else "measured"
        return f"engine: {self.engine}" + (f", {how}: {times}" if times else "") + (f"; {reasons}" if reasons else "")


@dataclass(frozen=True)
class LayerPrecision:
    """A layer of a model in lower precision: what was measured of it by itself."""

    layer: str
    precision: str
    error: float
    """Relative to its results in float32."""
    seconds: float
    float32_seconds: float
    method: str = ""
    """How its weight is stored, if its activations decided."""

    def __str__(self) -> str:
        if self.precision == "float32":
            return f"{self.layer}: float32, {self.float32_seconds * 1e3:.3g} ms"
        times = f"{self.float32_seconds * 1e3:.3g} → {self.seconds * 1e3:.3g} ms"
        method = f" ({self.method})" if self.method else ""
        return f"{self.layer}: {self.precision}{method}, error {self.error:.1e}, {times}"


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision that was chosen for each layer, and what became of results and time."""

    wanted: str
    max_drop: float
    drop: float
    layers: tuple[LayerPrecision, ...]
    seconds: float
    """Of a call."""
    float32_seconds: float
    details: str = ""
    """Relative error, divergence and agreement."""
    remark: str = ""
    """Why the model runs in float32 after all, if it does."""
    remembered: bool = False

    @property
    def is_float32(self) -> bool:
        """Whether every layer runs in float32."""
        return all(layer.precision == "float32" for layer in self.layers)

    @property
    def summary(self) -> str:
        """One line: how many layers have which precision, the drop, and the time."""
        counts = _counts(Counter(layer.precision for layer in self.layers)) or "no layers"
        times = f"{self.float32_seconds * 1e3:.3g} → {self.seconds * 1e3:.3g} ms"
        drop = f"drop {self.drop:.1e} of at most {self.max_drop:.1e}"
        how = ", chosen before" if self.remembered else ""
        return f"precision {self.wanted}: {counts}; {drop}{self.details}; {times}{how}"

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [f"  {self.remark}"] if self.remark else []
        return "\n  ".join([*lines, *(f"  {layer}" for layer in self.layers)])


@dataclass
class Recordings:
    """CUDA graphs of a session: how many were recorded, and how many calls replayed one."""

    recorded: int = 0
    replays: int = 0
    refused: str = ""
    """Why shapes were last not recorded."""

    def refuse(self, reason: str) -> None:
        """Note why a shape is not recorded; calls run without a graph."""
        if reason != self.refused:
            log.info("no CUDA graph: %s", reason)
        self.refused = reason

    def __str__(self) -> str:
        refused = f"; not recorded: {self.refused}" if self.refused else ""
        return f"CUDA graphs: {self.recorded} recorded, {self.replays} calls replayed{refused}"


@dataclass
class RegionReport:
    """The report of one ONNX model."""

    operators: Counter[str] = field(default_factory=Counter)
    nodes_translated: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    weights: int = 0
    sessions: int = 0
    choice: Choice | None = None
    """The choice of `auto`, if that is the engine."""
    precision: PrecisionChoice | None = None
    """The precision of each layer, with the option `precision`."""
    in_place: int = 0
    """Keys and values that calls append to in place."""
    concatenated: list[str] = field(default_factory=list)
    """Inputs that are copied at each call, to append to them, and why."""
    recordings: Recordings | None = None
    """Of the last session's CUDA graphs, on a GPU."""
    placement: Mapping[str, Counter[str]] = field(default_factory=dict)
    """On a GPU, the operators by execution provider."""
    snapshots: dict[str, GraphSnapshot] = field(default_factory=dict)
    """With the option `report`: the graph by stage: "translated", "rewritten" by rules, and as it "runs"."""
    times: dict[str, float] = field(default_factory=dict)
    """With the option `report`: seconds of a call by node, as the engine reports them."""
    errors: dict[str, float] = field(default_factory=dict)
    """With the option `report`: the error of each FX node's value against PyTorch, without rules."""
    max_error: float | None = None
    """With the option `report`: the error of the results against PyTorch, with rules."""
    remarks: list[str] = field(default_factory=list)
    """With the option `report`: what could not be measured, and why."""

    @property
    def nodes(self) -> int:
        """Number of nodes in the engine's model."""
        return sum(self.operators.values())


_warned: set[Fallback] = set()


@dataclass
class GraphReport:
    """The report of one captured graph."""

    kind: str
    operators: int
    regions: list[RegionReport] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    own: dict[str, str] = field(default_factory=dict)
    """With `translator="torchlib"`: operators that our own table translated nevertheless, and why."""
    seconds: dict[str, float] = field(default_factory=dict)

    def note_fallback(self, fallback: Fallback, *, warn: bool) -> None:
        """Record that an operator runs in torch; each is warned of once per process."""
        if fallback in self.fallbacks:
            return
        self.fallbacks.append(fallback)
        if warn and fallback not in _warned:
            _warned.add(fallback)
            log.warning("in torch: %s", fallback)

    def note_own(self, own: Mapping[str, str]) -> None:
        """Record operators that our own table translated, though torchlib was tried first."""
        for operator, reason in own.items():
            if operator not in self.own:
                log.info("%s graph: %s by our own table: %s", self.kind, operator, reason)
        self.own |= own

    def replace(self, report: RegionReport, by: RegionReport) -> None:
        """Replace the report of a region."""
        self.regions = [by if region is report else region for region in self.regions]

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """While active, add the elapsed time to a stage."""
        started = time.perf_counter()
        try:
            with show_progress(f"{self.kind} graph of {self.operators} operators, {name}"):
                yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            log.info("%s graph: %s took %.1f ms", self.kind, name, seconds * 1e3)


@dataclass
class Report:
    """The result of `sardonyx.explain`: every graph that was compiled, and how."""

    graphs: list[GraphReport] = field(default_factory=list)
    max_error: float | None = None

    @property
    def fallbacks(self) -> list[Fallback]:
        """All operators that run in torch."""
        return [fallback for graph in self.graphs for fallback in graph.fallbacks]

    @property
    def rules(self) -> Counter[str]:
        """How often each rewrite rule applied."""
        return sum((region.rules for graph in self.graphs for region in graph.regions), Counter())

    @property
    def operators(self) -> Counter[str]:
        """The ONNX operators that the engine runs."""
        return sum((region.operators for graph in self.graphs for region in graph.regions), Counter())

    @property
    def nodes(self) -> int:
        """Total number of ONNX nodes."""
        return sum(self.operators.values())

    @property
    def precision(self) -> PrecisionChoice | None:
        """The precision of each layer of the first model for which one was chosen; None without that option."""
        choices = (region.precision for graph in self.graphs for region in graph.regions)
        return next((choice for choice in choices if choice is not None), None)

    @property
    def seconds(self) -> dict[str, float]:
        """Time by stage."""
        total: dict[str, float] = {}
        for graph in self.graphs:
            for stage, seconds in graph.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total

    def __str__(self) -> str:
        if not self.graphs:
            return "nothing was compiled: everything ran in torch"
        lines = [f"{len(self.graphs)} graph(s), {self.nodes} ONNX nodes, {len(self.fallbacks)} operator(s) in torch"]
        for index, graph in enumerate(self.graphs):
            lines += _graph_lines(index, graph)
        if self.rules:
            lines.append("rules: " + _counts(self.rules))
        times = {stage: s for stage, s in self.seconds.items() if stage not in _MINOR_PASSES}
        lines.append("time:  " + ", ".join(f"{stage} {s * 1e3:.0f} ms" for stage, s in times.items()))
        if self.max_error is not None:
            lines.append(f"largest difference from eager: {self.max_error:.2e}")
        return "\n".join(lines)


def _graph_lines(index: int, graph: GraphReport) -> list[str]:
    lines = [f"graph {index} ({graph.kind}): {graph.operators} operators in {len(graph.regions)} region(s)"]
    for region in graph.regions:
        lines.append(f"  ONNX {region.nodes_translated} → {region.nodes} nodes, {region.weights} weights")
        lines.append("  " + _counts(region.operators))
        if region.choice is not None:
            lines.append(f"  {region.choice}")
        if region.precision is not None:
            lines.append(f"  {region.precision}")
        lines += _cache_lines(region)
        for provider, operators in region.placement.items():
            lines.append(f"  {provider}: {operators.total()} nodes" + _unless_expected(provider, operators))
        if region.recordings is not None:
            lines.append(f"  {region.recordings}")
    lines += [f"  by our own table: {operator}: {reason}" for operator, reason in graph.own.items()]
    return lines + [f"  in torch: {fallback}" for fallback in graph.fallbacks]


def _cache_lines(region: RegionReport) -> list[str]:
    reasons = Counter(text.partition(": ")[2] for text in region.concatenated)
    lines = [f"  caches: {region.in_place} appended in place"] if region.in_place or reasons else []
    return lines + [f"  {count} concatenated at each call: {reason}" for reason, count in reasons.items()]


def _unless_expected(provider: str, operators: Counter[str]) -> str:
    """Return which operators run on the CPU beside a GPU."""
    return f": {_counts(operators)}" if provider == "CPUExecutionProvider" else ""


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} ×{count}" for name, count in counter.most_common())


_collector: ContextVar[Report | None] = ContextVar("sardonyx_report", default=None)


@contextmanager
def collecting() -> Iterator[Report]:
    """While active, graphs that are compiled are added to the report that it yields."""
    report = Report()
    token = _collector.set(report)
    try:
        yield report
    finally:
        _collector.reset(token)


def new_graph_report(kind: str, operators: int) -> GraphReport:
    """Create the report of one graph, and add it to the report that `collecting` yields."""
    graph = GraphReport(kind, operators)
    report = _collector.get()
    if report is not None:
        report.graphs.append(graph)
    return graph


Observer: TypeAlias = Callable[[Any, Any], Any]
"""Takes an engine's job and its runner; returns the runner to use."""
_observer: ContextVar[Observer | None] = ContextVar("sardonyx_observer", default=None)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """While active, `observer` is called for every model that is loaded, and returns the runner to use for it."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def is_observed() -> bool:
    """Whether `observing` is active."""
    return _observer.get() is not None


def observed(job: Any, runner: R) -> R:
    """Return the runner to use for a model that was loaded."""
    observer = _observer.get()
    return runner if observer is None else cast(R, observer(job, runner))
