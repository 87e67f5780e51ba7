"""Cache keys: what a cached result depends on besides its input, that is processor, package versions and our code."""

from __future__ import annotations

import hashlib
import platform
import re
from functools import cache
from pathlib import Path

from sardonyx.versions import versions


@cache
def cpu() -> str:
    """Return the processor's architecture and a digest of its instruction sets."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags = sorted(set(re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)))
    return f"{platform.machine()} {hashlib.sha256(repr(flags).encode()).hexdigest()[:16]}"


@cache
def own_code() -> str:
    """Return a digest of this package's source, so that edits of it invalidate cached results."""
    root = Path(__file__).parents[1]
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hashed.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


def key_of(**parts: str) -> str:
    """Return a disk cache key of these parts, this processor, the package versions and our code.

    >>> key_of(a="1", b="23") == key_of(a="12", b="3")
    False
    """
    return key_of_source(**parts, versions=repr(sorted(versions().items())), code=own_code())


def key_of_source(**parts: str) -> str:
    """Return a key of these parts and this processor alone, as for a compiler's output."""
    return hashlib.sha256(repr((cpu(), sorted(parts.items()))).encode()).hexdigest()
