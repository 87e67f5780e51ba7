"""The device is enabled once for the process: torch has no way back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sardonyx import eager


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """Nothing runs on the CPU, unless a test lets it."""
    eager.enable(fallback="error")
    yield
    eager.enable(fallback="error")
