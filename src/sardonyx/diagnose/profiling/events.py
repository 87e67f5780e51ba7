"""Read onnxruntime's profile: nodes with their times, threads, memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from sardonyx.telemetry.graph_snapshot import GraphSnapshot, NodeSnapshot

_SUFFIX = "_kernel_time"
_MICRO = 1e-6


@dataclass(frozen=True)
class NodeTime:
    """A node as onnxruntime ran it; seconds and bytes are per call."""

    name: str
    operator: str
    seconds: float
    count: float
    """How often it ran in a call: in a loop more than once."""
    origin: NodeSnapshot | None
    """The node of the model that it is, or whose result it computes; None if unknown."""
    output_bytes: int = 0
    threads: int = 1
    """Maximum number of threads that worked on it."""
    provider: str = ""

    @property
    def is_fused(self) -> bool:
        """Whether onnxruntime fused it from several nodes, which share its time."""
        return self.origin is None or self.origin.name != self.name


@dataclass(frozen=True)
class Events:
    """The profile of one session over some calls, without warm-up calls."""

    nodes: Sequence[NodeTime]
    calls: int
    run_seconds: float
    """Seconds of one call inside onnxruntime: kernels, and time between them."""
    threads: int = 1
    """Threads in its pool, including the calling one."""
    arena_peak: int = 0
    """Maximum bytes in use in its arena; 0 if not reported."""
    raw: Sequence[Any] = field(default=(), repr=False)
    """The events as onnxruntime wrote them, in the format of chrome://tracing."""

    @property
    def seconds(self) -> float:
        """Seconds of the kernels of one call."""
        return sum(node.seconds for node in self.nodes)


@dataclass
class _Sum:
    """The sum of the events of one node."""

    event: Any
    outer: str
    micros: float = 0.0
    count: int = 0
    threads: int = 1


def read(file: Path, optimized: Path | None, snapshot: GraphSnapshot, skip: int, calls: int) -> Events:
    """Read the profile of a session, except its first `skip` runs; the rest were `calls` calls of the model."""
    raw = json.loads(file.read_text(encoding="utf-8"))
    runs = sorted((e for e in raw if e["name"] == "model_run"), key=lambda e: e["ts"])[skip:]
    start = runs[0]["ts"] if runs else float("inf")
    kernels = [e for e in raw if e["cat"] == "Node" and e["name"].endswith(_SUFFIX) and e["ts"] >= start]
    origins = _Origins(snapshot, optimized)
    return Events(
        [_node(total, calls, origins) for total in _sums(kernels)],
        calls,
        sum(run["dur"] for run in runs) * _MICRO / calls,
        max((_pool(e) for e in kernels), default=1),
        max((int(e["args"].get("mem_in_use_peak", 0)) for e in kernels), default=0),
        raw,
    )


def _node(total: _Sum, calls: int, origins: _Origins) -> NodeTime:
    args, name = total.event["args"], _name(total.event)
    return NodeTime(
        name,
        args["op_name"],
        total.micros * _MICRO / calls,
        total.count / calls,
        origins.of(name) or origins.of(total.outer),
        int(args.get("output_size") or 0),
        total.threads,
        args.get("provider", ""),
    )


def _sums(kernels: Iterable[Any]) -> list[_Sum]:
    """Sum the events by node; the time of nodes in a subgraph is not counted for the outer node too."""
    sums: dict[tuple[str, str], _Sum] = {}
    around: dict[Any, list[Any]] = defaultdict(list)
    for event in sorted(kernels, key=lambda e: (e["ts"], -e["dur"])):
        stack = around[event["tid"]]
        while stack and event["ts"] + event["dur"] > stack[-1]["ts"] + stack[-1]["dur"]:
            stack.pop()
        outer = _name(stack[0]) if stack else _name(event)
        if stack:
            sums[_key(stack[-1])].micros -= event["dur"]
        stack.append(event)
        total = sums.setdefault(_key(event), _Sum(event, outer))
        total.micros += event["dur"]
        total.count += 1
        total.threads = max(total.threads, 1 + sum(sub["num_run"] > 0 for sub in _worker_threads(event)))
    return list(sums.values())


def _name(event: Any) -> str:
    return str(event["name"]).removesuffix(_SUFFIX)


def _key(event: Any) -> tuple[str, str]:
    return _name(event), str(event["args"].get("node_index"))


def _worker_threads(event: Any) -> list[Any]:
    """Return the statistics of a kernel's worker threads; empty if there is no pool."""
    stats = event["args"].get("thread_scheduling_stats")
    return list(stats["sub_threads"].values()) if isinstance(stats, dict) else []


def _pool(event: Any) -> int:
    return 1 + len(_worker_threads(event))


class _Origins:
    """Maps nodes of onnxruntime to nodes of the model, by name or by output."""

    def __init__(self, snapshot: GraphSnapshot, optimized: Path | None) -> None:
        self._by_name = {node.name: node for node in snapshot.nodes}
        producers = {value: node for node in snapshot.nodes for value in node.outputs}
        self._by_result: dict[str, NodeSnapshot | None] = {}
        for node in onnx.load(optimized, load_external_data=False).graph.node if optimized else ():
            origin = next((producers[value] for value in node.output if value in producers), None)
            self._by_result[node.name] = None if node.name in self._by_result else origin

    def of(self, name: str) -> NodeSnapshot | None:
        """Return the node of the model, if known."""
        return self._by_name.get(name) or self._by_result.get(name)
