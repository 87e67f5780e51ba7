"""A model that int8 would ruin: it keeps its accuracy, and the report says which layers stay."""

from __future__ import annotations

import pytest
from benchmarks.precision_guard import guard

from sardonyx.native.linear import PRECISIONS

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(
        any(PRECISIONS[name].missing() for name in ("bf16", "int8")), reason="no AVX512 for bfloat16 and int8"
    ),
]
READ_OUTLIERS = {"0.up", "1.up", "2.up"}


def test_channels_of_layers_that_read_outliers_are_scaled() -> None:
    found = guard("outliers", "int8", 0.02, rounds=1)
    assert found.error <= 0.02
    assert {*found.smoothed, *found.kept} >= READ_OUTLIERS
    assert READ_OUTLIERS & {*found.smoothed}


def test_layers_that_read_outliers_stay_in_a_higher_precision_where_few_rows_say_too_little_to_scale_them() -> None:
    found = guard("outliers", "int8", 0.01, rounds=1, rows=8)
    assert found.error <= 0.01
    assert {*found.kept} >= READ_OUTLIERS
    assert found.layers.get("int8", 0) > 0
