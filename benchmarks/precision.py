"""How fast models run in fewer bits, and how far the results are from float32's: `python -m benchmarks.precision`.

Peers that need packages beyond `sardonyx[cpu]` run in an environment of their own, which `make bench-precision` makes.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.internals import collecting
from benchmarks.machine import resident_megabytes, versions
from benchmarks.models import MODELS as RANDOM_MODELS
from benchmarks.models import Case, llama_step, make
from benchmarks.precision_engines import ENGINES, PEERS, USUAL
from benchmarks.sentences import load_encoder, sentences
from benchmarks.tables import Table, milliseconds, say
from benchmarks.turns import Measured, Prepared, Suite, parsed, parser, say_failures, take_turns

_SENTENCES = 32
_PEERS_PYTHON = Path("build/precision-peers/bin/python")


def minilm() -> Case:
    """The trained encoder all-MiniLM-L6-v2 over 32 sentences of up to 27 tokens."""
    encoder, tokenize = load_encoder()
    return encoder, tuple(tokenize(sentences(_SENTENCES)).values())


MODELS: Mapping[str, Callable[[], Case]] = {
    **{name: RANDOM_MODELS[name] for name in ("bert-base", "vit-base", "llama-prefill")},
    "llama-step": partial(llama_step, 256),
    **{name: RANDOM_MODELS[name] for name in ("resnet50", "convnext-tiny", "whisper-encoder")},
    "all-minilm": minilm,
}
"""Every model by name, in the order they are measured; all but the last have random weights."""

SUITE = Suite("precision", __doc__, tuple(MODELS), tuple(ENGINES), ours=("sardonyx",))


def prepare(model: str, engine: str) -> Prepared:
    """The model in the engine, called once; the error is that of the result, relative to eager float32's."""
    torch.set_grad_enabled(False)
    module, args = make(MODELS[model])
    expected = module(*args)
    started = time.perf_counter()
    with collecting() as report:
        call = ENGINES[engine](module, args)
        result = call()
    first = time.perf_counter() - started
    details = {**_choices(report), "resident_mb": resident_megabytes(), "versions": versions(PEERS.get(engine, ()))}
    graphs = len(report.graphs) if engine.startswith("sardonyx") else None
    return Prepared(call, first, relative_error(result, expected), graphs, details)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The Frobenius norm of the difference, relative to that of what is expected."""
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def _choices(report: Any) -> dict[str, Any]:
    """What was chosen for layers, as reports tell it: their number by type, and why a model is in float32."""
    found = [region.precision for graph in report.graphs for region in graph.regions if region.precision is not None]
    if not found:
        return {}
    layers = Counter(layer.precision for choice in found for layer in choice.layers)
    remarks = "; ".join(choice.remark for choice in found if choice.remark)
    return {"layers": dict(layers), "drop": max(choice.drop for choice in found), "remark": remarks}


def table(title: str, results: Sequence[Measured]) -> Table:
    """A row for each model and engine."""
    columns = ["model", "engine", "ms", "× eager", "error", "layers", "first call s", "MB"]
    made = Table(title, columns, text_columns=2)
    for model, group in groupby(results, key=lambda m: m.model):
        members = list(group)
        eager = next((m.seconds for m in members if m.engine == "eager"), None)
        for m in members:
            made.add(model, m.engine, *_cells(m, eager))
        made.end_section()
    return made


def _cells(m: Measured, eager: float | None) -> tuple[str, ...]:
    if m.seconds is None or m.first_call_seconds is None or m.error_vs_eager is None:
        return ("failed", "", "", "", "", "")
    faster = "" if eager is None else f"{eager / m.seconds:.2f}"
    layers = ", ".join(f"{count} {name}" for name, count in m.details.get("layers", {}).items())
    rest = (f"{m.error_vs_eager:.1e}", layers, f"{m.first_call_seconds:.0f}", f"{m.details.get('resident_mb', 0):.0f}")
    return milliseconds(m.seconds), faster, *rest


def remarks(results: Sequence[Measured]) -> Iterator[str]:
    """Why models of ours run in float32 after all."""
    for m in results:
        if m.details.get("remark"):
            yield f"{m.engine} on {m.model}: {m.details['remark']}"


def _show(title: str, results: Sequence[Measured]) -> None:
    table(title, results).show()
    for remark in remarks(results):
        say(remark)
    say_failures(results)


def with_peers(suite: Suite, python: Path) -> Suite:
    """The suite with peers in that Python, or in this one if there is none."""
    found = str(python) if python.exists() else sys.executable
    return replace(suite, pythons=dict.fromkeys(PEERS, found))


def main() -> None:
    """Measure what the command line asks for."""
    options = parser(SUITE, USUAL)
    options.add_argument("--peers", type=Path, default=_PEERS_PYTHON, help="the Python that has the packages of peers")
    given = parsed(SUITE, options)
    take_turns(with_peers(SUITE, given.peers), given, _show)


if __name__ == "__main__":
    main()
