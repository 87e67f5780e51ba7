"""An empty cache for each test."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sardonyx.cache.disk import DiskCache


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 2**30)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "sardonyx.cache")
    return caplog
