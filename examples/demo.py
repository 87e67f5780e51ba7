"""What sardonyx is for: a model, made faster by one line, with the same answers.

First a trained sentence encoder answers three questions, eagerly and compiled. Then models of other kinds run
eagerly, through inductor and through sardonyx, side by side. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn

from sardonyx import Report
from sardonyx.telemetry.report import collecting
from sardonyx.telemetry.verify import difference

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, it finds its neighbour `benchmarks`

from benchmarks import models
from benchmarks.machine import note_if_busy
from benchmarks.sentences import Tokens, load_encoder
from benchmarks.tables import Progress, Table, milliseconds, progress, say

Call: TypeAlias = Callable[[], Any]

_ROUNDS = 5
_ROUND_SECONDS = 0.2
_PAUSE_SECONDS = 0.05  # a thread pool spins for a moment after a run, and would take a core from who comes next
_BATCH = 4

SENTENCES = [
    "The ferry to the island leaves every morning at seven.",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "She tuned the old violin before the concert began.",
    "A black hole bends the light that passes near it.",
    "The goalkeeper saved a penalty in the last minute of the final.",
    "Fresh basil, pine nuts, garlic and olive oil make a good pesto.",
    "The bank raised its interest rate by a quarter of a percent.",
    "Our cat sleeps on the warm router all afternoon.",
    "Glaciers in the Alps have lost a third of their volume since the turn of the century.",
    "He forgot his password and was locked out of the account.",
    "The orchestra played the second symphony without a conductor.",
    "Telescopes in space see infrared light that the air would absorb.",
    "The train was late, so we missed the connection in Lyon.",
    "Inflation makes savings lose value over the years.",
    "Puppies need short walks and a great deal of sleep.",
    "Simmer the tomatoes for an hour, and salt them only at the end.",
    "The striker signed a contract for three seasons with a club in Spain.",
    "Two-factor authentication protects you even when someone has stolen your login.",
    "Checkmate.",
    "The sea level rises as the oceans warm and the ice sheets of Greenland and Antarctica melt into them.",
]
QUERIES = ["how do I cook an Italian sauce", "climate change", "keeping an online account safe"]


def scores(encode: Callable[..., torch.Tensor], documents: Sequence[Tokens], queries: Tokens) -> torch.Tensor:
    """How near each query is to each sentence."""
    vectors = torch.cat([encode(**batch) for batch in documents])
    return encode(**queries) @ vectors.T


def interleaved(calls: Mapping[str, Call], rounds: int = _ROUNDS) -> dict[str, float]:
    """The median seconds of each call, which take turns."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(_PAUSE_SECONDS)
            times[name].append(_round(call))
    return {name: median(found) for name, found in times.items()}


def _round(call: Call) -> float:
    """The median of as many calls as fit in a while, of at least three."""
    times: list[float] = []
    end = time.perf_counter() + _ROUND_SECONDS
    while len(times) < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return median(times)


def search() -> None:
    """The sentence encoder: the same ranking as eager, sooner."""
    encoder, tokenize = load_encoder()
    documents = [tokenize(SENTENCES[i : i + _BATCH]) for i in range(0, len(SENTENCES), _BATCH)]
    queries = tokenize(QUERIES)

    compiled = torch.compile(encoder, backend="sardonyx", dynamic=True)

    with collecting() as report:
        found = scores(compiled, documents, queries)
    expected = scores(encoder, documents, queries)
    _show_answers(found, expected)
    runs: dict[str, Callable[..., torch.Tensor]] = {"eager": encoder, "sardonyx": compiled}
    _show_search(report, interleaved({name: partial(scores, run, documents, queries) for name, run in runs.items()}))


def _show_answers(found: torch.Tensor, expected: torch.Tensor) -> None:
    for query, row in zip(QUERIES, found, strict=True):
        say(f"  {query!r}")
        for score, index in zip(*(x.tolist() for x in row.topk(2)), strict=True):
            say(f"    {score:.3f}  {SENTENCES[index]}")
    same = torch.equal(found.argsort(descending=True), expected.argsort(descending=True))
    say(f"  ranking of all {len(SENTENCES)} sentences {'as' if same else 'NOT as'} in eager, for every query;")
    say(f"  largest difference of a score: {(found - expected).abs().max().item():.1e}")


def _show_search(report: Report, seconds: Mapping[str, float]) -> None:
    eager, ours = seconds["eager"], seconds["sardonyx"]
    say(f"  {len(report.graphs)} graph(s) for all lengths, {report.nodes} ONNX nodes, {_in_torch(report)} in torch")
    say(f"  eager {milliseconds(eager)} ms, sardonyx {milliseconds(ours)} ms: {eager / ours:.2f} times as fast\n")


def _in_torch(report: Report) -> str:
    if not report.graphs:
        return "everything"
    return ", ".join(sorted({fallback.operator for fallback in report.fallbacks})) or "none"


@dataclass
class Compared:
    """One model in three engines."""

    seconds: Mapping[str, float]
    error: float
    report: Report

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        times = [milliseconds(self.seconds[n]) if n in self.seconds else "failed" for n in ("eager", "inductor")]
        ours, eager = self.seconds["sardonyx"], self.seconds["eager"]
        counts = (str(len(self.report.graphs)), str(self.report.nodes), _in_torch(self.report))
        return (*times, milliseconds(ours), f"{eager / ours:.2f}×", f"{self.error:.1e}", *counts)


SHOWN: Mapping[str, Callable[[], models.Case]] = {
    "MLP 16-32-16, batch 8": models.MODELS["tiny-mlp"],
    "BERT 4×512, 128 tokens": partial(models.bert, layers=4, hidden=512),
    "Llama 4×512, 256 tokens": models.MODELS["llama-prefill"],
    "Llama 4×512, 1 token": models.MODELS["llama-decode"],
    "ResNet-50, 224×224": models.MODELS["resnet50"],
    "ViT-base, 224×224": models.MODELS["vit-base"],
}


def compare(name: str, shown: Progress) -> Compared:
    """Compile a model both ways and let the three take turns."""
    torch._dynamo.reset()  # models that share a class share dynamo's limit of compilations and its guesses at sizes
    model, args = models.make(SHOWN[name])
    runs: dict[str, Call] = {"eager": partial(model, *args)}
    shown.step(f"{name}: inductor compiles")
    _add_inductor(runs, model, args)
    shown.step(f"{name}: sardonyx compiles")
    with collecting() as report:
        runs["sardonyx"] = partial(torch.compile(model, backend="sardonyx"), *args)
        error = difference(runs["sardonyx"](), model(*args))
    shown.step(f"{name}: taking turns")
    return Compared(interleaved(runs), error, report)


def _add_inductor(runs: dict[str, Call], model: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    call = partial(torch.compile(model), *args)
    try:
        call()
    except Exception as error:  # it needs a C++ compiler, which the others here do not
        say(f"  inductor failed: {str(error).splitlines()[0]}")
    else:
        runs["inductor"] = call


def main() -> None:
    """Both parts."""
    started = time.perf_counter()
    note_if_busy()
    with torch.no_grad():
        say(f"semantic search with all-MiniLM-L6-v2: {len(SENTENCES)} sentences, {len(QUERIES)} queries\n")
        search()
        columns = [
            "model",
            "eager ms",
            "inductor ms",
            "sardonyx ms",
            "vs eager",
            "max error",
            "graphs",
            "nodes",
            "in torch",
        ]
        table = Table("latency, random weights (median; the engines take turns)", columns)
        with progress(3 * len(SHOWN)) as shown:
            for name in SHOWN:
                table.add(name, *compare(name, shown).cells())
        table.show()
    note_if_busy()
    say(f"{torch.get_num_threads()} thread(s); {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
