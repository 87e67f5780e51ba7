"""The result of a profile: a tree of modules, tables by operator and source line, and overhead outside kernels."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sardonyx.atomic_files import write_file
from sardonyx.diagnose.profiling.events import Events, NodeTime

FUSED = "fused by onnxruntime"
"""Module and source line of a node that onnxruntime fused and renamed."""
NATIVE_KERNELS = "native kernels"
"""Module of a native kernel whose origin is unknown."""
_NO_SOURCE = "not in the source"


@dataclass(frozen=True)
class Row:
    """A row of a table: name, seconds and count per call, and share of the kernels' time."""

    name: str
    seconds: float
    count: float
    share: float


@dataclass
class Scope:
    """A module, with the time of its nodes and submodules."""

    name: str
    path: str
    kind: str = ""
    """Class of the module."""
    own: float = 0.0
    """Seconds of nodes that are not in a submodule."""
    count: float = 0.0
    children: dict[str, Scope] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of all nodes in it."""
        return self.own + sum(child.seconds for child in self.children.values())

    @property
    def nodes(self) -> float:
        """Number of nodes that run in it."""
        return self.count + sum(child.nodes for child in self.children.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        entry = {"name": self.name, "path": self.path, "kind": self.kind, "seconds": self.seconds, "nodes": self.nodes}
        return {**entry, "children": [child.as_dict() for child in self.by_time()]}

    def by_time(self) -> list[Scope]:
        """Return the submodules, slowest first."""
        return sorted(self.children.values(), key=lambda child: -child.seconds)


@dataclass(frozen=True)
class Overhead:
    """The seconds of a call, in parts. Calls take a little longer with a profiler."""

    call: float
    """Without a profiler."""
    profiled: float
    """With a profiler: the sum of the following."""
    kernels: float
    engine: float
    """In the engine, outside kernels."""
    binding: float
    """Passing tensors to the engine and back."""
    torch: float
    """In torch: guards, wrappers, and operators that run in torch."""

    @property
    def outside(self) -> float:
        """Seconds outside kernels."""
        return self.engine + self.binding + self.torch


@dataclass(frozen=True)
class Threads:
    """The engine's use of threads."""

    pool: int
    parallel: float
    """Share of the kernels' time in which more than one thread worked."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes."""

    weights: int
    activations: int
    """Total bytes that nodes write in a call."""
    arena_peak: int
    """Peak of the engine's arena, including copied weights; 0 if not reported."""


@dataclass(frozen=True)
class Profile:
    """The result of `profile`: where the time of a call goes."""

    calls: int
    tree: Scope
    operators: Sequence[Row]
    lines: Sequence[Row]
    overhead: Overhead
    threads: Threads
    memory: Memory
    nodes: Sequence[NodeTime]
    remarks: Sequence[str] = ()
    _raw: Sequence[Sequence[Any]] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; times are seconds of one call, sizes bytes."""
        return {
            "calls": self.calls,
            "overhead": {**asdict(self.overhead), "outside": self.overhead.outside},
            "tree": self.tree.as_dict(),
            "operators": [asdict(row) for row in self.operators],
            "lines": [asdict(row) for row in self.lines],
            "threads": asdict(self.threads),
            "memory": asdict(self.memory),
            "nodes": [_node_dict(node) for node in self.nodes],
            "remarks": list(self.remarks),
        }

    def save_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write onnxruntime's events for chrome://tracing or Perfetto; each session is shown as a process."""
        events = [{**event, "pid": number} for number, raw in enumerate(self._raw) for event in raw]
        write_file(Path(path), json.dumps(events))
        return Path(path)

    def __str__(self) -> str:
        from sardonyx.diagnose.profiling.text import format_profile

        return format_profile(self)


@dataclass(frozen=True)
class Measurement:
    """The measured calls: the events of each session, and the seconds of a call."""

    events: Sequence[Events]
    weights: int
    plain: float
    profiled: float
    sessions: float
    """Seconds of the profiled call in sessions."""
    remarks: Sequence[str] = ()


# Aggregation


def profile_of(measured: Measurement) -> Profile:
    """Aggregate a measurement by module, operator and source line."""
    nodes = [node for events in measured.events for node in events.nodes]
    kernels = sum(node.seconds for node in nodes)
    runs = sum(events.run_seconds for events in measured.events)
    busy = sum(node.seconds for node in nodes if node.threads > 1)
    return Profile(
        min((events.calls for events in measured.events), default=0),
        _tree(nodes),
        _rows(nodes, lambda node: node.operator),
        _rows(nodes, _line_of),
        Overhead(
            measured.plain,
            measured.profiled,
            kernels,
            max(runs - kernels, 0.0),
            max(measured.sessions - runs, 0.0) if measured.events else measured.sessions,
            max(measured.profiled - measured.sessions, 0.0),
        ),
        Threads(max((events.threads for events in measured.events), default=1), busy / kernels if kernels else 0.0),
        Memory(
            measured.weights,
            int(sum(node.output_bytes * node.count for node in nodes)),
            sum(events.arena_peak for events in measured.events),
        ),
        sorted(nodes, key=lambda node: -node.seconds),
        tuple(measured.remarks),
        tuple(events.raw for events in measured.events),
    )


def _line_of(node: NodeTime) -> str:
    if node.origin is None:
        return FUSED
    return node.origin.where or _NO_SOURCE


def _rows(nodes: Iterable[NodeTime], name_of: Callable[[NodeTime], str]) -> list[Row]:
    """Aggregate by a name, slowest first."""
    seconds: dict[str, float] = {}
    counts: dict[str, float] = {}
    for node in nodes:
        name = name_of(node)
        seconds[name] = seconds.get(name, 0.0) + node.seconds
        counts[name] = counts.get(name, 0.0) + node.count
    total = sum(seconds.values()) or 1.0
    rows = [Row(name, spent, counts[name], spent / total) for name, spent in seconds.items()]
    return sorted(rows, key=lambda row: -row.seconds)


def _tree(nodes: Iterable[NodeTime]) -> Scope:
    root = Scope("", "")
    for node in nodes:
        scope = root
        for path, name in _module_path(node):
            kinds = node.origin.kinds if node.origin is not None else {}
            scope = scope.children.setdefault(name, Scope(name, path))
            scope.kind = scope.kind or kinds.get(path, "")
        scope.own += node.seconds
        scope.count += node.count
    return root


def _module_path(node: NodeTime) -> Iterator[tuple[str, str]]:
    """Iterate over the modules that contain a node, outermost first, as (path, name)."""
    if node.origin is None:
        yield FUSED, FUSED
        return
    if node.origin.is_native and not node.origin.scope:
        yield NATIVE_KERNELS, NATIVE_KERNELS
    parts = node.origin.scope.split(".") if node.origin.scope else []
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end]), parts[end - 1]


def _node_dict(node: NodeTime) -> dict[str, Any]:
    origin = node.origin
    return {
        "name": node.name,
        "operator": node.operator,
        "seconds": node.seconds,
        "count": node.count,
        "module": origin.scope if origin else FUSED,
        "line": origin.where if origin else FUSED,
        "fused": node.is_fused,
        "threads": node.threads,
        "output_bytes": node.output_bytes,
        "provider": node.provider,
    }
