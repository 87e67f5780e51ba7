"""What a wheel has to hold: every file of the package, and nothing else."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

_CACHES = frozenset({"__pycache__", ".mypy_cache"})


def package_files(src: Path) -> set[str]:
    """Every file below `src`, by its path from there, but for what Python and the build leave behind."""
    paths = (path.relative_to(src) for path in src.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not _is_left_behind(path.parts)}


def _is_left_behind(parts: tuple[str, ...]) -> bool:
    return any(part in _CACHES or part.endswith(".egg-info") for part in parts)


def wheel_files(wheel: Path) -> set[str]:
    """Every file that the wheel installs, but for its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not PurePosixPath(name).parts[0].endswith(".dist-info")}


def differences(wanted: Iterable[str], found: Iterable[str]) -> list[str]:
    """What is wrong with a wheel, a line a file.

    >>> differences({"a.py", "a.h"}, {"a.py", "b.py"})
    ['a.h is missing', 'b.py is not in the sources']
    """
    wanted, found = set(wanted), set(found)
    missing = [f"{name} is missing" for name in sorted(wanted - found)]
    return missing + [f"{name} is not in the sources" for name in sorted(found - wanted)]
