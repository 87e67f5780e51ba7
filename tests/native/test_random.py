"""Random graphs agree with onnxruntime; see `tests/native/random.py` for longer runs."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.native.random import check

_BATCH = 40


@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.integers(0, 2**32), min_size=_BATCH, max_size=_BATCH, unique=True))
def test_random_graphs_agree_with_onnxruntime(seeds: list[int]) -> None:
    outcome = check(seeds, quickly=True)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.compared > _BATCH // 2
