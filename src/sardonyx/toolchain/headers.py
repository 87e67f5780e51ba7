"""Read the C++ headers of this package, which generated sources include as text to be self-contained."""

from __future__ import annotations

from importlib import resources


def read_header(package: str, name: str) -> str:
    """Return the text of a header of a package, without `#pragma once`."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8").replace("#pragma once\n", "")
