"""Twenty small architectures in `precision="auto"`: within the bound, each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from sardonyx.native.linear import PRECISIONS
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import collecting
from tests.models.architectures import ARCHITECTURES

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(any(p.missing() for p in PRECISIONS.values()), reason="no AVX512 for bfloat16 and int8"),
]
BOUND = 0.03


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_results_stay_within_the_bound(name: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    build, make = ARCHITECTURES[name]
    model, arguments = build().eval(), make()
    options: dict[str, Any] = {"precision": "auto", "max_drop": BOUND, "cache_dir": ""}
    with collecting() as report:
        results = pytree.tree_leaves(torch.compile(model, backend="sardonyx", options=options)(**arguments))
    choices = [region.precision for graph in report.graphs for region in graph.regions]
    assert any(choice and {layer.precision for layer in choice.layers} != {"float32"} for choice in choices)
    assert all(choice.drop <= BOUND for choice in choices if choice)
    for result, expected in zip(results, pytree.tree_leaves(model(**arguments)), strict=True):
        if isinstance(expected, torch.Tensor) and expected.dtype.is_floating_point:
            assert relative_error(result, expected) <= BOUND * 1.01
