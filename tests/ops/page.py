"""The results of a sweep as a page for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

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

DTYPES = "float32 int64 bool float16"
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

COLUMNS = {"passed": "right", "empty": "right, without elements", "refused": "in torch", "rejected": "PyTorch raises"}


def page(results: dict[str, Any]) -> str:
    """Markdown: totals, then a row for each operator."""
    outcomes = results["outcomes"]
    dtypes = sorted({o["dtype"] for o in outcomes}, key=lambda dtype: (dtype not in DTYPES, DTYPES.find(dtype)))
    found = {(o["operator"], o["dtype"]): o for o in outcomes}
    names = sorted({o["operator"] for o in outcomes}, key=str.lower)
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    many = f"up to {results['samples']} samples each" if results["samples"] else "every sample"
    head = HEAD.format(command="`make ops`" if results["samples"] else "`make ops-full`")
    lines = [head, f"{results['date']}, {many}, CPU, with {made}.\n"]
    lines += [*_operators(outcomes, dtypes), "", *_samples(outcomes, dtypes), "", *_table(names, dtypes, found)]
    return "\n".join(lines) + "\n"


def _operators(outcomes: list[dict[str, Any]], dtypes: list[str]) -> list[str]:
    counts = Counter((o["dtype"], o["verdict"]) for o in outcomes)
    shown = [verdict for verdict in MARKS if any(counts[dtype, verdict] for dtype in dtypes)]
    rows = [f"| {dtype} | " + " | ".join(str(counts[dtype, v]) for v in shown) + " |" for dtype in dtypes]
    return ["| operators | " + " | ".join(MARKS[v] for v in shown) + " |", "|---" * (len(shown) + 1) + "|", *rows]


def _samples(outcomes: list[dict[str, Any]], dtypes: list[str]) -> list[str]:
    lines = ["| samples | " + " | ".join(COLUMNS.values()) + " | in ONNX |", "|---" * (len(COLUMNS) + 2) + "|"]
    for dtype in dtypes:
        counts = sample_counts(outcomes, dtype)
        cells = " | ".join(str(counts[column]) for column in COLUMNS)
        lines.append(f"| {dtype} | {cells} | {share(counts)} |")
    return lines


def sample_counts(outcomes: list[dict[str, Any]], dtype: str) -> Counter[str]:
    """How many samples of a dtype became what."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome["dtype"] == dtype:
            counts.update({column: outcome.get(column, 0) for column in COLUMNS})
    return counts


def share(counts: Counter[str]) -> str:
    """How much of what PyTorch runs went through ONNX."""
    right, total = counts["passed"] + counts["empty"], counts.total() - counts["rejected"]
    return f"{right / total:.1%}" if total else "–"


def _table(names: list[str], dtypes: list[str], found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = ["| operator | " + " | ".join(dtypes) + " | why not all |", "|---" * (len(dtypes) + 2) + "|"]
    for name in names:
        row = [found.get((name, dtype)) for dtype in dtypes]
        marks = " | ".join(_mark(o) if o else "" for o in row)
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
