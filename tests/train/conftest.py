"""For tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def gradients() -> Iterator[None]:
    """Tests run without gradients unless they ask for them."""
    with torch.enable_grad():
        yield
