"""What became of a model's nodes: which are kernels, which are not and why, and what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir

from sardonyx.native.carve import Part, Plan
from sardonyx.native.select import Choice, expected

_SHOWN = 12
"""Lines of a list that are printed."""


@dataclass(frozen=True)
class Taken:
    """Nodes that are one kernel, and the seconds that they and the kernel take, where it was measured."""

    kernel: str
    node: str
    """The node of the new model that calls the kernel. Both are empty for what was put back."""
    nodes: Sequence[str]
    operators: Sequence[str]
    seconds_before: float | None = None
    seconds_after: float | None = None
    why_not: str = ""
    """Why they are none after all."""
    launches_saved: int = 0
    bytes_saved: int = 0
    """What was expected: nodes less to launch, bytes less to write and read between them."""

    @property
    def times(self) -> str:
        """Both times and their ratio, as text."""
        if self.seconds_before is None or self.seconds_after is None:
            return ""
        return _times(self.seconds_before, self.seconds_after)


@dataclass(frozen=True)
class Left:
    """A node that stays as it is."""

    node: str
    operator: str
    why: str


@dataclass(frozen=True)
class NativeReport:
    """What native compilation did to a model. Printed, it is for people."""

    nodes_before: int
    nodes_after: int
    kernels: Sequence[Taken]
    put_back: Sequence[Taken] = ()
    """Kernels that were built, measured, and not used."""
    left: Sequence[Left] = ()
    seconds_before: float | None = None
    seconds_after: float | None = None
    """What a call of the whole model takes, where it was measured."""

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        return asdict(self)

    @classmethod
    def of_dict(cls, told: Mapping[str, Any]) -> NativeReport:
        """From what `as_dict` gave."""
        listed = {"kernels": Taken, "put_back": Taken, "left": Left}
        lists: dict[str, Any] = {name: [kind(**x) for x in told[name]] for name, kind in listed.items()}
        return cls(**{**told, **lists})

    def __str__(self) -> str:
        count = sum(len(taken.nodes) for taken in self.kernels)
        lines = [
            f"{self.nodes_before} nodes → {self.nodes_after}: {_counted(len(self.kernels), 'kernel')} "
            f"in the place of {_counted(count, 'node')}"
        ]
        if self.seconds_before is not None and self.seconds_after is not None:
            lines.append(f"whole model: {_times(self.seconds_before, self.seconds_after)}")
        for title, listed in (("kernels", self.kernels), ("put back", self.put_back)):
            lines += [title] * bool(listed) + _shortened([_line(same) for same in _alike(listed)])
        reasons = Counter((left.operator, left.why) for left in self.left)
        lines += ["left to onnxruntime"] * bool(reasons)
        return "\n".join(lines + _shortened([f"{n:>4} × {op}: {why}" for (op, why), n in reasons.most_common()]))


def _alike(listed: Sequence[Taken]) -> list[list[Taken]]:
    groups: dict[tuple[str, ...], list[Taken]] = {}
    for taken in listed:
        groups.setdefault((taken.kernel, *taken.operators, taken.times, taken.why_not), []).append(taken)
    return list(groups.values())


def _line(same: Sequence[Taken]) -> str:
    first = same[0]
    told = [" ".join(first.operators), first.times, first.why_not]
    name = f"{first.kernel}: " if first.kernel else ""
    return f"{len(same):>4} × {name}" + "; ".join(part for part in told if part)


def _times(before: float, after: float) -> str:
    return f"{_time(before)} → {_time(after)}, ×{before / after:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _SHOWN
    return lines if more <= 0 else [*lines[:_SHOWN], f"     and {more} more"]


def working(model: ir.Model) -> int:
    """The nodes of a model that do something at each call, in branches and loops too."""
    return sum(node.op_type != "Constant" for node in model.graph.all_nodes())


def report_of(plan: Plan, choice: Choice = "auto") -> NativeReport:
    """What a plan is going to do, before it is done."""
    nodes = [node for node in plan.model.graph.all_nodes() if node.op_type != "Constant"]
    taken = {node for part in plan.parts for node in part.group}
    before = working(plan.model)
    otherwise = "nothing around it to share a kernel with" if choice == "auto" else "not selected"
    return NativeReport(
        nodes_before=before,
        nodes_after=before - len(taken) + len(plan.parts),
        kernels=[_taken(part) for part in plan.parts],
        left=[
            Left(str(node.name), node.op_type, plan.refused.get(node, otherwise)) for node in nodes if node not in taken
        ],
    )


def _taken(part: Part) -> Taken:
    names, operators = [str(node.name) for node in part.group], [node.op_type for node in part.group]
    save = expected(part.group)
    return Taken(part.name, part.node_name, names, operators, launches_saved=save.launches, bytes_saved=save.bytes)


def after_measuring(planned: NativeReport, tried: Sequence[Taken], kept: Collection[int]) -> NativeReport:
    """A report of a smaller plan, with what was measured of the larger one."""
    kernels = [
        replace(taken, seconds_before=tried[i].seconds_before, seconds_after=tried[i].seconds_after)
        for taken, i in zip(planned.kernels, sorted(kept), strict=True)
    ]
    put_back = [replace(taken, kernel="", node="") for i, taken in enumerate(tried) if i not in kept]
    names = {name for taken in put_back for name in taken.nodes}
    left = [left for left in planned.left if left.node not in names]
    return replace(planned, kernels=kernels, put_back=put_back, left=left)
