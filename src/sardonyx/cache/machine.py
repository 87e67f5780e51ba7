"""What a kept result depends on beside its input: the processor, the packages, and this package's own code."""

from __future__ import annotations

import hashlib
import platform
import re
from functools import cache
from pathlib import Path

from sardonyx.versions import versions


@cache
def cpu() -> str:
    """The processor's architecture and instruction sets: what native code of one machine may lack on another."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    abilities = sorted(set(re.findall(r"^(?:flags|Features)\s*:(.*)$", told, re.MULTILINE)))
    return f"{platform.machine()} {hashlib.sha256(repr(abilities).encode()).hexdigest()[:16]}"


@cache
def own_code() -> str:
    """A digest of this package's source: whoever works on it must not be given what an older state of it made."""
    root = Path(__file__).parents[1]
    hashed = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hashed.update(f"\0{path.relative_to(root)}\0".encode() + path.read_bytes())
    return hashed.hexdigest()


def key_of(**parts: str) -> str:
    """A key for the disk cache that no other parts have, on this processor and with these packages and this code.

    >>> key_of(a="1", b="23") == key_of(a="12", b="3")
    False
    """
    return key_of_source(**parts, versions=repr(sorted(versions().items())), code=own_code())


def key_of_source(**parts: str) -> str:
    """A key for what follows from its parts alone, on this processor: what a compiler makes of a source."""
    return hashlib.sha256(repr((cpu(), sorted(parts.items()))).encode()).hexdigest()
