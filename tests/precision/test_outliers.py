"""A model that int8 would ruin: it keeps its accuracy, and the report says which layers stay."""

from __future__ import annotations

import pytest
from benchmarks.precision_guard import guard

from sardonyx.native.linear import PRECISIONS


@pytest.mark.usefixtures("ranked")
@pytest.mark.skipif(
    any(PRECISIONS[name].missing() for name in ("bf16", "int8")), reason="no AVX512 for bfloat16 and int8"
)
def test_layers_that_read_outliers_stay_in_a_higher_precision() -> None:
    found = guard("outliers", "int8", 0.01, rounds=1)
    assert found.error <= 0.01
    assert set(found.kept) >= {"0.up", "1.up", "2.up"}
    assert found.layers.get("int8", 0) + found.layers.get("bf16", 0) > 0
