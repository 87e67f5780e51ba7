"""For tests of the examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .example_cases import MADE, Case


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return MADE[request.param]()


@pytest.fixture
def sizes_that_kernels_know_are_captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
