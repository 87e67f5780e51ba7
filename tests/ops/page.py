"""The results of a sweep as a page for people, and those of a sweep on the device beside them.

python -m tests.ops.page docs/operators.json docs/eager-operators.json docs/operators.md
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from .check import Outcome
from .ways import EXPORTED, FALLBACK, STRICT

MARKS = {
    "passes": "✓",
    "only empty": "✓ empty",
    "partly": "partly",
    "in torch": "in torch",
    "no samples": "–",
    "WRONG": "**wrong**",
    "crash": "**crash**",
}
"""Every verdict, and how the page writes it."""

INTEGERS = "int64 int32 int16 int8 uint8 uint16 uint32 uint64"
DTYPES = f"float32 float64 float16 bfloat16 {INTEGERS} bool"
"""Their order on the page."""

HEAD = """# Operators

Every operator of PyTorch's own test database, run in eager and through `torch.compile(backend="sardonyx")` with no
fallback allowed, and compared: values, dtypes, shapes. Written by {command}; do not edit.

- ✓: every sample ran through ONNX and agreed with PyTorch.
- ✓ random: likewise, but some samples are random and draw other numbers than eager does under the same seed. Those are
  judged by dtype, shape and distribution (the test of Kolmogorov and Smirnov over many calls), and must repeat
  themselves under the same seed.
- ✓ shape: likewise, but PyTorch leaves the values uninitialised, so only dtype and shape are judged.
- ✓ empty: likewise, but no sample has a result with elements, so values were not compared.
- partly: so many of the samples ran and agreed; the others are left to PyTorch, for the reason beside.
- in torch: left to PyTorch. By default this costs speed, never correctness: the rest of the model still runs in ONNX.
- –: PyTorch has no samples of this dtype.

Of operators that name the place of one among equal elements (sort, topk, median, …), any such place is right.
"""

EDGES_HEAD = """To the database's samples come those at the edges of each dtype: its limits, zeros of both signs,
infinities, NaN, denormals, 2^53 ± 1, negative divisors (`tests/ops/edges.py`). Of elementwise operators the sign of
zeros is compared, too. `sardonyx.export` runs those samples alone. Integers of every width share a column.
"""

DEVICE_HEAD = """Beside them the same samples on the device `ort`, moved there and back:

- strict: nothing may run on the CPU, with `sardonyx.eager.enable(fallback="error")`. Random numbers are drawn by
  PyTorch's generator there too.
- with fallback: what has no ONNX model runs on the CPU over the same memory, with `fallback="quiet"`.
"""

COLUMNS = {"passed": "right", "empty": "right, without elements", "refused": "in torch", "rejected": "PyTorch raises"}

Results = dict[str, Any]
"""What a sweep was made with, and its outcomes."""


def page(results: Results, device: Results | None = None) -> str:
    """Markdown: totals, then a row for each operator."""
    outcomes = results["outcomes"] + (device["outcomes"] if device else [])
    kinds = sorted(set(map(kind_of, outcomes)), key=_order)
    columns = list(dict.fromkeys(map(_column, kinds)))
    found = _merged(outcomes)
    names = sorted({o["operator"] for o in outcomes}, key=lambda name: (name.lower(), name))
    lines = [HEAD.format(command=_command(results, device)), *[EDGES_HEAD] * ("edges" in results), _made(results)]
    if device:
        lines += [DEVICE_HEAD.rstrip("\n"), "", _made(device)]
    lines += [*_operators(outcomes, kinds), "", *_samples(outcomes, kinds), "", *_table(names, columns, found)]
    return "\n".join(lines) + "\n"


def kind_of(outcome: dict[str, Any]) -> str:
    """What has a row in the totals: a dtype, or another way than `torch.compile`, with its dtype if not float32."""
    way, dtype = outcome.get("way", ""), str(outcome["dtype"])
    return f"{way}, {dtype}" if way and dtype != "float32" else way or dtype


def _column(kind: str) -> str:
    """The column of a kind: integers of every width share one, as do the dtypes of another way."""
    way = next((way for way in (EXPORTED, STRICT, FALLBACK) if kind.startswith(way)), "")
    return way or ("integers" if kind in INTEGERS.split() else kind)


def _merged(outcomes: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """By operator and column, what became of all samples."""
    merged: dict[tuple[str, str], Outcome] = {}
    for line in outcomes:
        outcome = Outcome.of_json(line)
        key = (outcome.operator, _column(kind_of(line)))
        merged.setdefault(key, Outcome(outcome.operator, outcome.dtype)).add(outcome)
    return {key: outcome.as_json() for key, outcome in merged.items()}


def _order(kind: str) -> tuple[bool, int, str]:
    """Dtypes as they are written above, then others, and the ways of the device."""
    names = DTYPES.split()
    return kind not in names, names.index(kind) if kind in names else 0, kind.replace(FALLBACK, "the last")


def _command(results: Results, device: Results | None) -> str:
    command = "`make ops`" if results["samples"] else "`make ops-full`"
    return f"{command} and `make eager-ops`" if device else command


def _made(results: Results) -> str:
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    many = f"up to {results['samples']} samples each" if results["samples"] else "every sample"
    executor = f", the executor {results['executor']}" if "executor" in results else ""
    return f"{_dates(results)}, {many}, CPU, with {made}{executor}.\n"


def _dates(results: Results) -> str:
    """When the outcomes were made; a sweep takes hours, and goes on from day to day."""
    dates = Counter(outcome.get("date", results["date"]) for outcome in results["outcomes"])
    if len(dates) < 2:
        return str(results["date"])
    return "; ".join(f"{count} of {dates.total()} results on {date}" for date, count in sorted(dates.items()))


def _operators(outcomes: list[dict[str, Any]], kinds: list[str]) -> list[str]:
    counts = Counter((kind_of(o), o["verdict"]) for o in outcomes)
    shown = [verdict for verdict in MARKS if any(counts[kind, verdict] for kind in kinds)]
    rows = [f"| {kind} | " + " | ".join(str(counts[kind, v]) for v in shown) + " |" for kind in kinds]
    return ["| operators | " + " | ".join(MARKS[v] for v in shown) + " |", "|---" * (len(shown) + 1) + "|", *rows]


def _samples(outcomes: list[dict[str, Any]], kinds: list[str]) -> list[str]:
    lines = ["| samples | " + " | ".join(COLUMNS.values()) + " | right of all |", "|---" * (len(COLUMNS) + 2) + "|"]
    for kind in kinds:
        counts = sample_counts(outcomes, kind)
        cells = " | ".join(str(counts[column]) for column in COLUMNS)
        lines.append(f"| {kind} | {cells} | {share(counts)} |")
    return lines


def sample_counts(outcomes: list[dict[str, Any]], kind: str) -> Counter[str]:
    """How many samples of a kind became what."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if kind_of(outcome) == kind:
            counts.update({column: outcome.get(column, 0) for column in COLUMNS})
            counts["failed"] += len(outcome.get("wrong", [])) + len(outcome.get("crashed", []))
    return counts


def share(counts: Counter[str]) -> str:
    """How much of what PyTorch runs is right; strictly and compiled, all of that went through ONNX."""
    right, total = counts["passed"] + counts["empty"], counts.total() - counts["rejected"]
    return f"{right / total:.1%}" if total else "–"


def _table(names: list[str], columns: list[str], found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = ["| operator | " + " | ".join(columns) + " | why not all |", "|---" * (len(columns) + 2) + "|"]
    for name in names:
        row = [found.get((name, column)) for column in columns]
        marks = " | ".join(_mark(o) if o else MARKS["no samples"] for o in row)
        lines.append(f"| `{name}` | {marks} | {_reason([o for o in row if o])} |")
    return lines


def _mark(outcome: dict[str, Any]) -> str:
    right = outcome.get("passed", 0) + outcome.get("empty", 0)
    if outcome["verdict"] == "partly":
        return f"partly, {right} of {right + outcome['refused']}"
    if outcome["verdict"] == "passes" and outcome.get("random"):
        return "✓ random"
    if outcome["verdict"] == "passes" and outcome.get("shape_only"):
        return "✓ shape"
    return MARKS[outcome["verdict"]]


def _reason(row: list[dict[str, Any]]) -> str:
    for outcome in row:
        reasons = outcome.get("reasons", {})
        if outcome.get("refused") and reasons:
            return str(max(reasons, key=reasons.get)).replace("|", "\\|")[:140]
    return ""


def page_of(compiled: Path, device: Path) -> str:
    """The page of what two sweeps left."""
    both = (json.loads(path.read_text()) for path in (compiled, device))
    return page(*({**results["made"], "outcomes": results["outcomes"]} for results in both))


if __name__ == "__main__":
    one, other, written = map(Path, sys.argv[1:])
    written.write_text(page_of(one, other))
