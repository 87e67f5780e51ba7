"""The result of a comparison: every value that both ways have, and where the error jumps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sardonyx.diagnose.comparison.errors import ValueStats
from sardonyx.diagnose.comparison.subject import Place

_JUMP = 10.0
"""Growth of an error, against those of its inputs, that counts as a jump."""
_SHOWN = 5


@dataclass(frozen=True)
class Row:
    """A value, and its error between the two ways."""

    place: Place
    error: float
    """Largest difference over all calls, relative to the largest magnitude of the first way."""
    before: float
    """Largest error of the values it is computed from."""
    tolerance: float
    call: int
    """The call with the largest error."""
    stats: tuple[ValueStats, ValueStats]
    """Statistics of the value in each way, in that call."""
    reaches: bool = True
    """Whether a difference here propagates to values computed from it, or to a result."""

    @property
    def differs(self) -> bool:
        """Whether the error exceeds the tolerance."""
        return not self.error <= self.tolerance

    @property
    def growth(self) -> float:
        """Ratio of the error to that of the inputs; errors far below the tolerance are ignored."""
        if math.isinf(self.error):
            return 1.0 if math.isinf(self.before) else math.inf
        return self.error / max(self.before, self.tolerance / _JUMP, 1e-300)

    @property
    def jumps(self) -> bool:
        """Whether the error begins here."""
        return self.differs and self.growth >= _JUMP

    def __str__(self) -> str:
        where = f"\n  at: {self.place.where}" if self.place.where else ""
        return f"{self.place}: {self.error:.2e}, from {self.before:.2e} in what it reads{where}"


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`."""

    ways: tuple[str, str]
    rows: tuple[Row, ...]
    """Every value that both ways have, in the order of computation."""
    errors: Mapping[str, float]
    """The error of each result, in a run without intermediate outputs."""
    differs: bool
    """Whether the error of a result exceeds the tolerance."""
    traced: float = 0.0
    """The error of the graph that torch.export traced against the module."""

    @property
    def suspects(self) -> list[Row]:
        """Values where an error that reaches the results jumps, in order; else where it grows most."""
        if not self.differs:
            return []
        differing = [row for row in self.rows if row.differs and row.reaches]
        jumps = [row for row in differing if row.jumps]
        return jumps or sorted(differing, key=lambda row: -row.growth)[:_SHOWN]

    @property
    def first(self) -> Row | None:
        """The first value where the error jumps."""
        return self.suspects[0] if self.suspects else None

    @property
    def error(self) -> float:
        """The largest error of a result."""
        return max(self.errors.values(), default=0.0)

    def modules(self) -> list[Row]:
        """Return for each module the value where the error grows most, in the order in which modules end."""
        most: dict[str, Row] = {}
        for row in self.rows:
            previous = most.pop(row.place.module, row)  # reinserted at the end
            most[row.place.module] = max(previous, row, key=lambda x: x.growth)
        return list(most.values())

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "ways": list(self.ways),
            "differs": self.differs,
            "errors": {name: as_number(error) for name, error in self.errors.items()},
            "traced": as_number(self.traced),
            "suspects": [_row_dict(row) for row in self.suspects],
            "rows": [_row_dict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        worst = f"results differ by {self.error:.2e} of their magnitude"
        lines = [f"{self.ways[1]} against {self.ways[0]}: {worst}; {len(self.rows)} values compared"]
        if self.traced:
            lines.append(f"the graph that torch.export traced differs from the module by {self.traced:.2e}")
        if self.suspects:
            lines.append("the error begins at" if self.suspects[0].jumps else "the error grows gradually; most at")
        lines += [str(row) for row in self.suspects[:_SHOWN]]
        if self.differs and not self.suspects:
            lines.append("no intermediate value differs: maybe a fusion that intermediate outputs prevent; try bisect")
        return "\n".join(lines)


def as_number(x: float) -> float | str:
    """Return a number for JSON, which has no infinity."""
    return x if math.isfinite(x) else str(x)


def _row_dict(row: Row) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row.place),
        "error": as_number(row.error),
        "before": as_number(row.before),
        "jumps": row.jumps,
        "call": row.call,
        "range": [str(stats) for stats in row.stats],
    }


def rank_rows(
    order: Sequence[Place],
    measured: Mapping[str, Row],
    parents: Mapping[str, Sequence[str]],
    ends: Sequence[str],
) -> tuple[Row, ...]:
    """Return the rows in order, each with the error of its inputs and whether its own propagates."""
    children: dict[str, list[str]] = {}
    for key, above in parents.items():
        for parent in above:
            children.setdefault(parent, []).append(key)
    rows = []
    for place in order:
        row = measured[place.key]
        before = max((measured[key].error for key in parents[place.key]), default=0.0)
        below = children.get(place.key, [])
        heals = bool(below) and place.key not in ends and not any(measured[key].differs for key in below)
        rows.append(dataclasses.replace(row, before=before, reaches=not heals))
    return tuple(rows)
