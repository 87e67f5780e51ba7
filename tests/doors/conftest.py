"""For modules whose sessions are counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sardonyx.options import defaults


@pytest.fixture
def nothing_on_disk() -> Iterator[None]:
    """No model that another test left on disk is used."""
    with defaults(cache_dir=""):
        yield
