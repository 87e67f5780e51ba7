"""Report native compilation: which nodes are in kernels, why others are not, and measured times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir

from sardonyx.native.partition import KernelGroup, KernelPlan
from sardonyx.native.select import Choice, expected_savings

_MAX_LINES = 12
"""Lines of a list that are printed."""


@dataclass(frozen=True)
class KernelEntry:
    """The nodes of a kernel, with the measured seconds of both."""

    kernel: str
    node: str
    """The node of the new model that calls the kernel; both are empty if it was put back."""
    nodes: Sequence[str]
    operators: Sequence[str]
    seconds_before: float | None = None
    seconds_after: float | None = None
    why_not: str = ""
    """Why the kernel is not used."""
    launches_saved: int = 0
    bytes_saved: int = 0
    """Expected savings: node launches, and bytes written and read between nodes."""

    @property
    def times(self) -> str:
        """Both times and their ratio, as text."""
        if self.seconds_before is None or self.seconds_after is None:
            return ""
        return _times(self.seconds_before, self.seconds_after)


@dataclass(frozen=True)
class LeftNode:
    """A node that is not in a kernel."""

    node: str
    operator: str
    why: str


@dataclass(frozen=True)
class NativeReport:
    """What native compilation did to a model; str() is a summary."""

    nodes_before: int
    nodes_after: int
    kernels: Sequence[KernelEntry]
    put_back: Sequence[KernelEntry] = ()
    """Kernels that were built and measured, but are not used."""
    left: Sequence[LeftNode] = ()
    seconds_before: float | None = None
    seconds_after: float | None = None
    """Measured time of a call of the whole model."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def of_dict(cls, data: Mapping[str, Any]) -> NativeReport:
        """Return the report of `as_dict`."""
        entry_types = {"kernels": KernelEntry, "put_back": KernelEntry, "left": LeftNode}
        lists: dict[str, Any] = {name: [kind(**x) for x in data[name]] for name, kind in entry_types.items()}
        return cls(**{**data, **lists})

    def __str__(self) -> str:
        count = sum(len(entry.nodes) for entry in self.kernels)
        lines = [
            f"{self.nodes_before} nodes → {self.nodes_after}: {_plural(len(self.kernels), 'kernel')} "
            f"in the place of {_plural(count, 'node')}"
        ]
        if self.seconds_before is not None and self.seconds_after is not None:
            lines.append(f"whole model: {_times(self.seconds_before, self.seconds_after)}")
        for title, entries in (("kernels", self.kernels), ("put back", self.put_back)):
            lines += [title] * bool(entries) + _truncate([_format_group(group) for group in _group_equal(entries)])
        reasons = Counter((left.operator, left.why) for left in self.left)
        lines += ["left to onnxruntime"] * bool(reasons)
        return "\n".join(lines + _truncate([f"{n:>4} × {op}: {why}" for (op, why), n in reasons.most_common()]))


def _group_equal(entries: Sequence[KernelEntry]) -> list[list[KernelEntry]]:
    groups: dict[tuple[str, ...], list[KernelEntry]] = {}
    for entry in entries:
        groups.setdefault((entry.kernel, *entry.operators, entry.times, entry.why_not), []).append(entry)
    return list(groups.values())


def _format_group(group: Sequence[KernelEntry]) -> str:
    first = group[0]
    fields = [" ".join(first.operators), first.times, first.why_not]
    name = f"{first.kernel}: " if first.kernel else ""
    return f"{len(group):>4} × {name}" + "; ".join(part for part in fields if part)


def _times(before: float, after: float) -> str:
    return f"{_time(before)} → {_time(after)}, ×{before / after:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _truncate(lines: list[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"     and {more} more"]


def count_nodes(model: ir.Model) -> int:
    """Return the number of nodes that run at each call, in subgraphs too."""
    return sum(node.op_type != "Constant" for node in model.graph.all_nodes())


def report_of(plan: KernelPlan, choice: Choice = "auto") -> NativeReport:
    """Return the report of a plan."""
    nodes = [node for node in plan.model.graph.all_nodes() if node.op_type != "Constant"]
    in_kernels = {node for part in plan.parts for node in part.group}
    before = count_nodes(plan.model)
    default_reason = "nothing around it to share a kernel with" if choice == "auto" else "not selected"
    return NativeReport(
        nodes_before=before,
        nodes_after=before - len(in_kernels) + len(plan.parts),
        kernels=[_kernel_entry(part) for part in plan.parts],
        left=[
            LeftNode(str(node.name), node.op_type, plan.rejected.get(node, default_reason))
            for node in nodes
            if node not in in_kernels
        ],
    )


def _kernel_entry(part: KernelGroup) -> KernelEntry:
    names, operators = [str(node.name) for node in part.group], [node.op_type for node in part.group]
    save = expected_savings(part.group)
    return KernelEntry(
        part.name, part.node_name, names, operators, launches_saved=save.launches, bytes_saved=save.bytes
    )


def with_measurements(planned: NativeReport, measured: Sequence[KernelEntry], kept: Collection[int]) -> NativeReport:
    """Return the report of a smaller plan with the measurements of the larger one."""
    kernels = [
        replace(entry, seconds_before=measured[i].seconds_before, seconds_after=measured[i].seconds_after)
        for entry, i in zip(planned.kernels, sorted(kept), strict=True)
    ]
    put_back = [replace(entry, kernel="", node="") for i, entry in enumerate(measured) if i not in kept]
    names = {name for entry in put_back for name in entry.nodes}
    left = [left for left in planned.left if left.node not in names]
    return replace(planned, kernels=kernels, put_back=put_back, left=left)
