"""Versions of Python and packages, for cache keys and reports."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("sardonyx", "torch", "onnx")


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that write and read models."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
