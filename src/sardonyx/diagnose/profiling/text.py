"""Format a profile as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sardonyx.telemetry.text import duration

if TYPE_CHECKING:
    from sardonyx.diagnose.profiling.result import Profile, Scope

_SHOWN = 12
_LEAST_SHOWN = 0.01


def format_profile(profile: Profile) -> str:
    """Format a profile."""
    return "\n".join([*_head(profile), "", *_tree_lines(profile), "", *_table_lines(profile)])


def _head(profile: Profile) -> list[str]:
    spent = profile.overhead
    total = spent.profiled or 1.0
    parts = {"kernels": spent.kernels, "engine": spent.engine, "binding": spent.binding, "torch": spent.torch}
    shares = ", ".join(f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in parts.items())
    memory, threads = profile.memory, profile.threads
    return [
        f"a call takes {duration(spent.call)}; {duration(spent.profiled)} while profiled, the mean of {profile.calls}",
        f"  {shares}",
        f"  threads: {threads.pool}, more than one at work in {threads.parallel:.0%} of the kernels' time",
        f"  memory: weights {format_bytes(memory.weights)}, written by nodes {format_bytes(memory.activations)}, "
        f"arena's peak {format_bytes(memory.arena_peak) if memory.arena_peak else 'unknown'}",
        *(f"  {remark}" for remark in profile.remarks),
    ]


def _tree_lines(profile: Profile) -> list[str]:
    total = profile.tree.seconds or 1.0
    return ["by module", *_scope_lines(profile.tree, "  ", total)]


def _scope_lines(scope: Scope, indent: str, total: float) -> list[str]:
    lines = []
    for child in scope.by_time():
        if child.seconds >= _LEAST_SHOWN * total:
            kind = f" ({child.kind})" if child.kind else ""
            lines.append(_line(child.seconds, total, child.nodes, f"{indent}{child.name}{kind}"))
            lines += _scope_lines(child, indent + "  ", total)
    if (scope.children or not scope.path) and scope.own >= _LEAST_SHOWN * total:
        lines.append(_line(scope.own, total, scope.count, f"{indent}itself" if scope.path else f"{indent}the model"))
    return lines


def _table_lines(profile: Profile) -> list[str]:
    total = profile.overhead.kernels or 1.0
    lines = []
    for title, rows in (("by operator", profile.operators), ("by source line", profile.lines)):
        lines += [title, *(_line(row.seconds, total, row.count, f"  {row.name}") for row in rows[:_SHOWN])]
        lines += [f"  and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
        lines.append("")
    return lines[:-1]


def _line(seconds: float, total: float, count: float, name: str) -> str:
    return f"{duration(seconds):>9} {seconds / total:>5.0%} {count:>5.0f} ×{name}"


def format_bytes(count: float) -> str:
    """Format a number of bytes.

    >>> format_bytes(512), format_bytes(4_200_000)
    ('512 B', '4.2 MB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
