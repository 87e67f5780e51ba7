"""How fast language models generate tokens, and how soon the first is there: `python -m benchmarks.generate`.

Every engine has a process of its own for each case; they take turns. Peers have environments of their own, which `make
bench-generate` makes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any

from benchmarks.generate_engines import ENGINES
from benchmarks.generate_engines import USUAL as USUAL_ENGINES
from benchmarks.generate_models import MODELS, write
from benchmarks.generate_models import USUAL as USUAL_MODELS
from benchmarks.generate_turns import Case, Contender, Measured, Places, compare_with_eager
from benchmarks.machine import describe, note_if_busy
from benchmarks.tables import Progress, Table, milliseconds, progress, say

_FOLDER = Path("build/generate")
_PEERS = ("optimum", "genai")


def measure(places: Places, case: Case, engines: Sequence[str], rounds: int, shown: Progress) -> list[Measured]:
    """Prepare the engines one after the other, let them take turns, and end them one after the other."""
    with contextlib.ExitStack() as stack:
        contenders = []
        for engine in engines:
            shown.step(f"{case}: preparing {engine}")
            contenders.append(stack.enter_context(Contender(places, case, engine)))
            contenders[-1].prepare()
        note_if_busy()
        for number in range(rounds):
            shown.step(f"{case}: round {number + 1} of {rounds}")
            for contender in random.Random(number).sample(contenders, len(contenders)):
                contender.round()
        for contender in contenders:
            shown.step(f"{case}: memory and disk cache of {contender.measured.engine}")
            contender.finish()
        results = [contender.measured for contender in contenders]
    compare_with_eager(results)
    return results


def table(results: Sequence[Measured]) -> Table:
    """A row for each case and engine."""
    columns = ["prompt×batch", "engine", "tokens/s", "× eager", "prefill ms", "cold s", "cached s", "peak MB", "same"]
    made = Table("generating", columns, text_columns=2)
    for case, group in groupby(results, key=lambda m: m.case):
        members = list(group)
        eager = next((m.decode for m in members if m.engine == "eager"), None)
        for m in members:
            made.add(str(case), m.engine, *_cells(m, eager))
        made.end_section()
    return made


def _cells(m: Measured, eager: float | None) -> tuple[str, ...]:
    if m.decode is None or m.prefill is None:
        return ("failed", "", "", "", "", "", "")
    faster = "" if eager is None else f"{m.decode / eager:.2f}"
    start = (_number(m.cold_seconds, ".2f"), _number(m.cached_seconds, ".2f"))
    same = "" if m.same_as_eager is None else f"{m.same_as_eager} of {m.case.tokens}"
    return f"{m.decode:.1f}", faster, milliseconds(m.prefill), *start, _number(m.peak_mb, ".0f"), same


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def show(results: Sequence[Measured]) -> None:
    """Print the table, and why some failed."""
    table(results).show()
    for m in results:
        if m.failed:
            say(f"failed: {m.engine} on {m.case}: {' '.join(m.failed.split())[-300:]}")


def _write(path: Path, machine: dict[str, Any], results: Sequence[Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**machine, "results": [m.as_dict() for m in results]}, indent=1) + "\n")
    temporary.replace(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.generate", description=__doc__)
    for name, usual, known in (("models", USUAL_MODELS, MODELS), ("engines", USUAL_ENGINES, ENGINES)):
        told = f"names, with commas between them; of {', '.join(known)}"
        made.add_argument(f"--{name}", type=_names(known), default=list(usual), help=told)
    made.add_argument("--prompts", type=_numbers, default=[16, 128, 1024], help="tokens of a prompt, with commas")
    made.add_argument("--batches", type=_numbers, default=[1, 4], help="prompts at once, with commas")
    made.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt, at least two")
    made.add_argument("--rounds", type=int, default=5, help="turns that each engine gets")
    made.add_argument("--timeout", type=float, default=1800, help="seconds that a process may take to answer")
    made.add_argument("--folder", type=Path, default=_FOLDER, help="where models and exported files are kept")
    for peer in _PEERS:
        python = Path(f"build/generate-{peer}/bin/python")
        made.add_argument(f"--{peer}", type=Path, default=python, help=f"the Python that has {peer}")
    made.add_argument("--json", type=Path, help="where to write everything measured")
    return made


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown name {unknown[0]!r}; there are {', '.join(known)}")
        return text.split(",")

    return names


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def places_of(given: argparse.Namespace) -> Places:
    """Where models and engines are; a peer whose environment is missing is looked for in this one."""

    def python(engine: str) -> str:
        peer = ENGINES[engine].peer
        found: Path | None = getattr(given, peer) if peer else None
        return str(found) if found is not None and found.exists() else sys.executable

    return Places(given.folder, python, given.timeout)


def main() -> None:
    """Measure what the command line asks for."""
    given = parser().parse_args()
    places, machine, results = places_of(given), describe(), []
    cases = [Case(*sizes, given.tokens) for sizes in product(given.models, given.prompts, given.batches)]
    with progress(len(cases) * (2 * len(given.engines) + given.rounds)) as shown:
        given.folder.mkdir(parents=True, exist_ok=True)
        for case in cases:
            write(case.model, places.model(case.model))
            results += measure(places, case, given.engines, given.rounds, shown)
            if given.json:
                _write(given.json, machine, results)
    show(results)


if __name__ == "__main__":
    main()
