"""The C++ headers that lie in this package, as generated sources take them in: whole, so that a source stands alone."""

from __future__ import annotations

from importlib import resources


def header(package: str, name: str) -> str:
    """The text of a header, by the package it lies in."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8").replace("#pragma once\n", "")
