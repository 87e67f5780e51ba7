"""Random graphs agree with onnxruntime and with float64; `python -m tests.native.random` runs more of them."""

from __future__ import annotations

from tests.native.random import batch

_GRAPHS = 40


def test_random_graphs_agree_with_onnxruntime_and_with_double_precision() -> None:
    outcome, smallest = batch(0, _GRAPHS, quickly=True)
    assert not outcome.failures, smallest
    assert outcome.compared > _GRAPHS // 2
