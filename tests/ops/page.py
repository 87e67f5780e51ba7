"""The results of a sweep as a page for people."""

from __future__ import annotations

from collections import Counter
from typing import Any

MARKS = {
    "passes": "✓",
    "partly": "partly",
    "in torch": "in torch",
    "no samples": "–",
    "WRONG": "**wrong**",
    "crash": "**crash**",
}

HEAD = """# Operators

Every operator of PyTorch's own test database, run in eager and through `torch.compile(backend="sardonyx")` with no
fallback allowed, and compared: values, dtypes, shapes. Written by `make ops`; do not edit.

- ✓: every sample ran through ONNX and agreed with PyTorch.
- partly: some samples ran and agreed; the others are left to PyTorch, for the reason beside.
- in torch: left to PyTorch. By default this costs speed, never correctness: the rest of the model still runs in ONNX.
- –: PyTorch has no samples of this dtype.
"""


def page(results: dict[str, Any]) -> str:
    """Markdown: totals, then a row for each operator."""
    outcomes = results["outcomes"]
    dtypes = list(dict.fromkeys(o["dtype"] for o in outcomes))
    found = {(o["operator"], o["dtype"]): o for o in outcomes}
    names = sorted({o["operator"] for o in outcomes}, key=str.lower)
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [HEAD, f"{results['date']}, up to {results['samples']} samples each, CPU, with {made}.\n"]
    lines += [*_totals(outcomes, dtypes), "", *_table(names, dtypes, found)]
    return "\n".join(lines) + "\n"


def _totals(outcomes: list[dict[str, Any]], dtypes: list[str]) -> list[str]:
    counts = Counter((o["dtype"], o["verdict"]) for o in outcomes)
    shown = [verdict for verdict in MARKS if any(counts[dtype, verdict] for dtype in dtypes)]
    rows = [f"| {dtype} | " + " | ".join(str(counts[dtype, v]) for v in shown) + " |" for dtype in dtypes]
    return ["| dtype | " + " | ".join(MARKS[v] for v in shown) + " |", "|---" * (len(shown) + 1) + "|", *rows]


def _table(names: list[str], dtypes: list[str], found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = ["| operator | " + " | ".join(dtypes) + " | why not all |", "|---" * (len(dtypes) + 2) + "|"]
    for name in names:
        row = [found.get((name, dtype)) for dtype in dtypes]
        marks = " | ".join(MARKS[o["verdict"]] if o else "" for o in row)
        lines.append(f"| `{name}` | {marks} | {_reason([o for o in row if o])} |")
    return lines


def _reason(row: list[dict[str, Any]]) -> str:
    for outcome in row:
        if outcome["refused"] and outcome["reasons"]:
            return str(max(outcome["reasons"], key=outcome["reasons"].get)).replace("|", "\\|")[:140]
    return ""
