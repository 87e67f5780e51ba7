"""Format a profile as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sardonyx.telemetry.text import duration

if TYPE_CHECKING:
    from sardonyx.diagnose.profiling.result import Profile, Scope

_SHOWN = 12
_LEAST_SHOWN = 0.01


def format_profile(found: Profile) -> str:
    """Format a profile."""
    return "\n".join([*_head(found), "", *_tree_lines(found), "", *_table_lines(found)])


def _head(found: Profile) -> list[str]:
    spent = found.overhead
    total = spent.profiled or 1.0
    parts = {"kernels": spent.kernels, "engine": spent.engine, "binding": spent.binding, "torch": spent.torch}
    shares = ", ".join(f"{name} {duration(seconds)} ({seconds / total:.0%})" for name, seconds in parts.items())
    memory = found.memory
    return [
        f"a call takes {duration(spent.call)}; {duration(spent.profiled)} while profiled, the mean of {found.calls}",
        f"  {shares}",
        f"  threads: {found.threads.pool}, more than one at work in {found.threads.parallel:.0%} of the kernels' time",
        f"  memory: weights {format_bytes(memory.weights)}, written by nodes {format_bytes(memory.activations)}, "
        f"arena's peak {format_bytes(memory.arena_peak) if memory.arena_peak else 'unknown'}",
        *(f"  {remark}" for remark in found.remarks),
    ]


def _tree_lines(found: Profile) -> list[str]:
    total = found.tree.seconds or 1.0
    return ["by module", *_scope_lines(found.tree, "  ", total)]


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


def _table_lines(found: Profile) -> list[str]:
    total = found.overhead.kernels or 1.0
    lines = []
    for title, rows in (("by operator", found.operators), ("by source line", found.lines)):
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
