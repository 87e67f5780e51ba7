"""Results of `benchmarks.precision` as tables in Markdown: `python -m benchmarks.precision_table FILE...`.

A model may be in several files, with other engines in each; its ratios are to eager in the same file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.precision import MODELS
from benchmarks.precision_engines import ENGINES
from benchmarks.tables import milliseconds, say

Result: TypeAlias = Mapping[str, Any]
Cells: TypeAlias = Mapping[tuple[str, str], str]
"""What to show, by model and engine."""


def results_of(content: Mapping[str, Any]) -> list[Result]:
    """The results of a file with the ratio of each to eager."""
    eager = {r["model"]: r["seconds"] for r in content["results"] if r["engine"] == "eager" and not r["failed"]}
    return [{**r, "times": _ratio(eager.get(r["model"]), r["seconds"])} for r in content["results"]]


def _ratio(eager: float | None, seconds: float | None) -> float | None:
    return eager / seconds if eager and seconds else None


def speed(result: Result) -> str:
    """The ratio to eager and the error, or the milliseconds of eager itself."""
    if result["failed"] or result["seconds"] is None:
        return "failed"
    if result["engine"] == "eager":
        return f"{milliseconds(result['seconds'])} ms"
    times = "" if result["times"] is None else f"{result['times']:.2f} "
    return f"{times}({result['error_vs_eager']:.1e})".replace("e-0", "e-")


def layers(result: Result) -> str:
    """The number of layers by type."""
    return ", ".join(f"{count} {name}" for name, count in result["details"].get("layers", {}).items())


def cells(results: Sequence[Result], show: Callable[[Result], str]) -> Cells:
    """What a function shows of each result, where that is anything; of several for one place the last."""
    shown = {(r["model"], r["engine"]): show(r) for r in results}
    return {place: text for place, text in shown.items() if text}


def markdown(found: Cells) -> str:
    """A row for each model, a column for each engine.

    >>> print(markdown({("bert-base", "eager"): "135 ms", ("bert-base", "sardonyx-bf16"): "4.66 (4.4e-3)"}))
    | | eager | sardonyx-bf16 |
    |---|---|---|
    | bert-base | 135 ms | 4.66 (4.4e-3) |
    """
    engines = [engine for engine in ENGINES if any(engine == name for _, name in found)]
    models = [model for model in MODELS if any(model == name for name, _ in found)]
    rows = [[model, *(found.get((model, engine), "–") for engine in engines)] for model in models]
    lines = ["| | " + " | ".join(engines) + " |", "|---" * (len(engines) + 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main() -> None:
    """Print one table of speeds and errors, and one of layers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision_table", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what `benchmarks.precision --json` wrote")
    contents = [json.loads(path.read_text()) for path in parser.parse_args().files]
    results = [result for content in contents for run in content.get("runs", [content]) for result in results_of(run)]
    for show in (speed, layers):
        say(markdown(cells(results, show)))
        say()


if __name__ == "__main__":
    main()
