"""The option `report`: one self-contained HTML file about what was compiled."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sardonyx.atomic_files import write_file
from sardonyx.capture.example import clone_tensors
from sardonyx.diagnose import html_measurements
from sardonyx.errors import MissingDependency, OptionError
from sardonyx.options import Options
from sardonyx.telemetry.graph_snapshot import GraphSnapshot, NodeSnapshot
from sardonyx.telemetry.report import GraphReport, RegionReport, Report
from sardonyx.telemetry.text import duration
from sardonyx.telemetry.verify import difference

compare_values, measure_region = html_measurements.compare_values, html_measurements.measure_region
why_not_compared = html_measurements.why_not_compared
"""Part of `ReportPage`, called at the first call of a region."""

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_GRAPHS = 64
"""Graphs in one file at most."""
_OWN_STAGE = "report"
_SHOWN = 20
_PACKAGES = ("sardonyx", "torch", "onnxruntime", "onnxruntime-gpu", "onnx", "onnx-ir", "onnxscript", "numpy")
_PASSES = {
    "FoldConstant": "expressions of constants are computed ahead of time",
    "ShareCommon": "equal nodes with equal inputs become one",
}


@dataclass
class _ReportFile:
    """The content of one report file."""

    options: Options
    report: Report = field(default_factory=Report)
    more: int = 0
    """Number of graphs that are left out."""


_files: dict[Path, _ReportFile] = {}
_lock = threading.Lock()


def add_graph(options: Options, graph: GraphReport) -> None:
    """Add a graph to the file that the options name; raises before any work if the file or jinja2 is unavailable."""
    if not options.report:
        return
    path = _path(options)
    _jinja()
    with _lock:
        file = _files.setdefault(path, _ReportFile(options))
        if len(file.report.graphs) < _MAX_GRAPHS:
            file.report.graphs.append(graph)
        else:
            file.more += 1


def write(options: Options) -> None:
    """Write the file that the options name, with everything added so far."""
    if not options.report:
        return
    path = _path(options)
    with _lock:
        file = _files.get(path)
        if file is not None:
            write_file(path, render(file.report, file.options, more=file.more))


def reset() -> None:
    """Forget all files."""
    with _lock:
        _files.clear()


def save(report: Report, path: str | os.PathLike[str], options: Options | None = None, title: str = "") -> Path:
    """Write a report to an HTML file. It shows graphs if the report was made with the option `report`.

    >>> import sardonyx, tempfile
    >>> report = sardonyx.explain(torch.nn.ReLU(), torch.ones(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     "<h1>" in save(report, Path(folder, "report.html"), title="a ReLU").read_text()
    True
    """
    path = Path(path)
    write_file(path, render(report, options or Options(), title))
    return path


def report_program(
    program: Any, args: Sequence[Any], kwargs: Mapping[str, Any], model: Callable[..., Any] | None = None
) -> None:
    """Write the report of an exported program, with the times of its nodes for these arguments."""
    from sardonyx.diagnose.profiling import profile

    options, region = program._options, program.report.graphs[-1].regions[-1]
    region.snapshots["runs"] = GraphSnapshot.of(program.model)
    with program.report.graphs[-1].stage("report"):
        for node in profile(program, *args, calls=5, **kwargs).nodes:
            if node.origin is not None:
                region.times[node.origin.name] = region.times.get(node.origin.name, 0.0) + node.seconds
        if model is not None:
            region.max_error = _error(program, model, args, kwargs)
    region.remarks.append("errors of single nodes are measured by torch.compile and sardonyx.compile, not by export")
    add_graph(options, program.report.graphs[-1])
    write(options)


def _error(program: Any, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    with torch.no_grad():
        results, expected = (pytree.tree_leaves(_fresh_call(run, args, kwargs)) for run in (program, model))
    pairs = zip(results, expected, strict=True)
    return max((difference(a, b) for a, b in pairs if isinstance(b, torch.Tensor)), default=0.0)


def _fresh_call(run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    args, kwargs = clone_tensors(args, kwargs)
    return run(*args, **kwargs)


def _path(options: Options) -> Path:
    path = Path(str(options.report)).absolute()
    if not path.parent.is_dir():
        raise OptionError(f"report is {options.report!r}, but there is no folder {path.parent}")
    return path


# The page


@cache
def _jinja() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependency(
            "the option 'report' needs the package jinja2", hint='pip install "sardonyx[report]"'
        ) from error
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ms": duration, "percent": "{:.1%}".format, "short": _short, "error": "{:.1e}".format}
    return environment


def render(report: Report, options: Options, title: str = "", more: int = 0) -> str:
    """Return the page as text."""
    regions = [(g, r) for g in report.graphs for r in g.regions]
    views = [_graph_view(number, graph, region) for number, (graph, region) in enumerate(regions) if region.snapshots]
    errors = [region.max_error for _, region in regions if region.max_error is not None]
    page: str = (
        _jinja()
        .get_template("report.html.in")
        .render(
            title=title or "Compilation report",
            report=report,
            more=more,
            translated=sum(region.nodes_translated for _, region in regions),
            max_error=max(errors, default=report.max_error),
            kernels=sum(sum(region.times.values()) for _, region in regions),
            stages=_bars(report.seconds),
            rules=[(name, count, _purpose(name)) for name, count in report.rules.most_common()],
            slowest=_slowest([region for _, region in regions]),
            shown=_SHOWN,
            native=_native([region for _, region in regions]),
            precisions=[region.precision for _, region in regions if region.precision is not None],
            engines=[_engine(options, region) for _, region in regions],
            remarks=list(dict.fromkeys(remark for _, region in regions for remark in region.remarks)),
            options=_options(options),
            environment=_environment(),
            drawings=views,
            data=json.dumps(views, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
            style=(_TEMPLATES / "report.css.in").read_text(encoding="utf-8"),
            script=(_TEMPLATES / "report.js.in").read_text(encoding="utf-8"),
        )
    )
    return page


def _short(where: str) -> str:
    """Shorten a source line: remove the folder of installed packages.

    >>> _short("/usr/lib/python3/site-packages/torch/nn/modules/linear.py:134 in forward")
    'torch/nn/modules/linear.py:134 in forward'
    """
    return where.rpartition("/site-packages/")[2]


def _bars(seconds: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return each stage with its time and its share of the longest, without the report's own measurements."""
    own = {name: spent for name, spent in seconds.items() if name != _OWN_STAGE}
    longest = max(own.values(), default=0.0) or 1.0
    return [(name, spent, spent / longest) for name, spent in own.items()]


def _purpose(name: str) -> str:
    """Return the documentation of a rule."""
    from sardonyx.optimize.optimizer import all_rules

    docs = {rule.name: " ".join(rule.doc.split()) for rule in all_rules()}
    return docs.get(name) or _PASSES.get(name, "")


def _slowest(regions: Sequence[RegionReport]) -> list[tuple[NodeSnapshot, float, float, float | None, int]]:
    """Return the slowest nodes, each with its seconds, share, error if known, and the index of its graph."""
    total = sum(sum(region.times.values()) for region in regions) or 1.0
    shown = [region for region in regions if region.snapshots]
    rows = [
        (node, region.times[node.name], region.times[node.name] / total, region.errors.get(node.fx), number)
        for number, region in enumerate(shown)
        for node in (region.snapshots["runs"].nodes if "runs" in region.snapshots else ())
        if node.name in region.times
    ]
    return sorted(rows, key=lambda row: -row[1])[:_SHOWN]


def _native(regions: Sequence[RegionReport]) -> list[tuple[NodeSnapshot, list[NodeSnapshot], float | None]]:
    """Return the native kernels, each with the nodes that it replaces and its seconds."""
    shown = [region for region in regions if {"runs", "rewritten"} <= set(region.snapshots)]
    return [
        (node, final.replaced_nodes(node, region.snapshots["rewritten"]), region.times.get(node.name))
        for region in shown
        for final in [region.snapshots["runs"]]
        for node in final.nodes
        if node.is_native
    ]


def _engine(options: Options, region: RegionReport) -> str:
    if region.choice is not None:
        return str(region.choice)
    return f"engine: {options.engine}, as the options say"


def _options(options: Options) -> list[tuple[str, str, bool, str]]:
    """Return each option's value, whether it differs from the default, and its meaning."""
    return [
        (f.name, repr(getattr(options, f.name)), getattr(options, f.name) != f.default, f.metadata["doc"])
        for f in dataclasses.fields(options)
    ]


def _environment() -> list[tuple[str, str]]:
    rows = [("python", platform.python_version()), ("system", platform.platform()), ("processor", platform.machine())]
    rows += [("threads of torch", str(torch.get_num_threads())), ("processors", str(os.cpu_count()))]
    return rows + [(name, installed) for name in _PACKAGES if (installed := _version(name))]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# Graphs as JSON for the page's script


def _graph_view(number: int, graph: GraphReport, region: RegionReport) -> dict[str, Any]:
    stages = {"before": "translated", "after": "runs"}
    return {
        "title": f"{number}: {graph.kind}, {region.nodes_translated} → {region.nodes} nodes",
        **{key: _graph(region.snapshots[stage], region) for key, stage in stages.items() if stage in region.snapshots},
    }


def _graph(snapshot: GraphSnapshot, region: RegionReport) -> dict[str, Any]:
    producers = {value: index for index, node in enumerate(snapshot.nodes) for value in node.outputs}
    lines: dict[str, int] = {}
    kinds: dict[str, str] = {}
    nodes = []
    for node in snapshot.nodes:
        kinds |= {path: kind for path, kind in node.kinds.items() if path}
        nodes.append(_node(node, snapshot, region, producers, lines.setdefault(node.where, len(lines))))
    return {
        "nodes": nodes,
        "inputs": list(snapshot.inputs.items()),
        "outputs": [[name, kind, producers.get(name)] for name, kind in snapshot.outputs.items()],
        "kinds": kinds,
        "wheres": list(map(_short, lines)),
    }


def _node(
    node: NodeSnapshot, snapshot: GraphSnapshot, region: RegionReport, producers: Mapping[str, int], where: int
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "n": node.name,
        "o": node.operator,
        "s": node.scope,
        "t": list(node.types),
        "w": where,
        "i": [producers[value] for value in node.inputs if value in producers],
        "g": [value for value in node.inputs if value in snapshot.inputs],
        "r": list(node.inputs),
    }
    optional = {
        "d": node.domain,
        "ms": _rounded(region.times.get(node.name), 1e3),
        "e": _rounded(region.errors.get(node.fx), 1.0),
        "k": _members(node, snapshot, region),
    }
    return entry | {key: value for key, value in optional.items() if value or value == 0}


def _rounded(value: float | None, scale: float) -> float | str | None:
    """Round to three digits; infinity, which JSON lacks, becomes text."""
    if value is None:
        return None
    return float(f"{value * scale:.3g}") if value != float("inf") else "inf"


def _members(node: NodeSnapshot, snapshot: GraphSnapshot, region: RegionReport) -> str:
    """Return the operators that a native kernel replaces."""
    if not node.is_native or "rewritten" not in region.snapshots:
        return ""
    return " ".join(other.operator for other in snapshot.replaced_nodes(node, region.snapshots["rewritten"]))
