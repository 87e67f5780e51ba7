"""What lower precision does to a trained model: `python -m benchmarks.precision_accuracy`.

all-MiniLM-L6-v2 encodes a thousand sentences, and answers the queries of `examples/demo.py`, in each precision. Every
encoding is compared with that in float32 by eager torch, and so is the order of the answers.
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from benchmarks.machine import describe
from benchmarks.sentences import Tokenize, Tokens, load_encoder, sentences
from benchmarks.tables import Table, say
from sardonyx.telemetry.report import collecting

Encode: TypeAlias = Callable[..., torch.Tensor]

_BATCH = 50
_DEMO = Path(__file__).parents[1] / "examples" / "demo.py"

SETTINGS: Sequence[Mapping[str, Any]] = (
    {"precision": "bf16"},
    {"precision": "int8"},
    {"precision": "int8", "max_drop": 0.035},
    {"precision": "int8", "max_drop": 0.1},
    {"precision": "auto"},
)


@dataclass(frozen=True)
class Search:
    """The batches of a corpus and of the demo's search."""

    corpus: Sequence[Tokens]
    documents: Sequence[Tokens]
    queries: Tokens

    @classmethod
    def of(cls, tokenize: Tokenize, count: int) -> Search:
        """So many sentences in batches of similar lengths; the demo's sentences and queries."""
        demo = runpy.run_path(str(_DEMO))
        return cls(
            _batches(tokenize, sorted(sentences(count), key=len), _BATCH),
            _batches(tokenize, demo["SENTENCES"], 4),
            tokenize(demo["QUERIES"]),
        )

    def encodings(self, encode: Encode) -> torch.Tensor:
        """One row for each sentence of the corpus."""
        return torch.cat([encode(**batch) for batch in self.corpus])

    def scores(self, encode: Encode) -> torch.Tensor:
        """How near each query is to each sentence of the demo."""
        return encode(**self.queries) @ torch.cat([encode(**batch) for batch in self.documents]).T


def _batches(tokenize: Tokenize, texts: Sequence[str], size: int) -> list[Tokens]:
    return [tokenize(texts[i : i + size]) for i in range(0, len(texts), size)]


@dataclass(frozen=True)
class Agreement:
    """How encodings and answers agree with those in float32."""

    least_cosine: float
    mean_cosine: float
    same_first_answers: bool
    same_order: float
    """The share of pairs of answers to a query that are in the same order."""
    largest_score_error: float


def agreement(search: Search, encode: Encode, exact: Encode) -> Agreement:
    """Compare one encoder with another."""
    cosines = F.cosine_similarity(search.encodings(encode), search.encodings(exact))
    scores, expected = search.scores(encode), search.scores(exact)
    return Agreement(
        float(cosines.min()),
        float(cosines.mean()),
        torch.equal(scores.argmax(-1), expected.argmax(-1)),
        same_order(scores, expected),
        float((scores - expected).abs().max()),
    )


def same_order(scores: torch.Tensor, expected: torch.Tensor) -> float:
    """The share of pairs of columns that are in the same order, in each row.

    >>> same_order(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[1.0, 2.0, 3.0]]))
    0.6667
    """
    first, second = torch.triu_indices(scores.shape[1], scores.shape[1], 1)
    signs, expected_signs = (torch.sign(x[:, first] - x[:, second]) for x in (scores, expected))
    return round(float((signs == expected_signs).double().mean()), 4)


@dataclass(frozen=True)
class Measured:
    """What came of one setting of the options."""

    options: Mapping[str, Any]
    layers: Mapping[str, int]
    drop: float
    """Of the call by which layers were chosen: the first batch."""
    agreement: Agreement


def measure(search: Search, encoder: torch.nn.Module, options: Mapping[str, Any]) -> Measured:
    """Compile the encoder with these options, and compare."""
    torch._dynamo.reset()
    encode = torch.compile(encoder, backend="sardonyx", dynamic=True, options={"fallback": "error", **options})
    with collecting() as report:
        agreed = agreement(search, encode, encoder)
    (choice,) = (region.precision for graph in report.graphs for region in graph.regions if region.precision)
    layers = Counter(layer.precision for layer in choice.layers)
    return Measured(options, dict(layers), choice.drop, agreed)


def table(results: Sequence[Measured]) -> Table:
    """A row for each setting."""
    columns = ["options", "layers", "drop", "least cosine", "mean cosine", "first answers", "pairs in order"]
    made = Table("all-MiniLM-L6-v2 against float32", columns, text_columns=2)
    for m in results:
        options = ", ".join(f"{name}={value}" for name, value in m.options.items())
        layers = ", ".join(f"{count} {name}" for name, count in m.layers.items())
        cosines = (f"{m.agreement.least_cosine:.5f}", f"{m.agreement.mean_cosine:.5f}")
        first = "same" if m.agreement.same_first_answers else "others"
        made.add(options, layers, f"{m.drop:.1e}", *cosines, first, f"{m.agreement.same_order:.1%}")
    return made


def main() -> None:
    """Measure, show, and write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.precision_accuracy", description=__doc__)
    parser.add_argument("--sentences", type=int, default=1000, help="how many are encoded")
    parser.add_argument("--json", type=Path, help="where to write everything measured")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    encoder, tokenize = load_encoder()
    search = Search.of(tokenize, given.sentences)
    results = []
    for options in SETTINGS:
        say(f"measuring {dict(options)}")
        results.append(measure(search, encoder, options))
    table(results).show()
    if given.json:
        content = {**describe(), "sentences": given.sentences, "results": [asdict(m) for m in results]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
