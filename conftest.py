"""For tests and for examples in docstrings alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests compile is kept for other tests of the same process, and never in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SARDONYX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))  # an Options object reads no variable
        yield
