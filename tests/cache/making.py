"""What the tests put into a cache."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sardonyx.cache.disk import DiskCache
from sardonyx.cache.manifest import MANIFEST


class Maker:
    """Writes a file of some bytes, and counts how often."""

    def __init__(self, contents: bytes = b"hello") -> None:
        self.contents, self.made = contents, 0

    def __call__(self, folder: Path) -> None:
        self.made += 1
        (folder / "model.bin").write_bytes(self.contents)
        (folder / "more").mkdir(exist_ok=True)
        (folder / "more" / "note.txt").write_text("a note")


def kept(cache: DiskCache, key: str, contents: bytes = b"hello") -> Path:
    return cache.get_or_make(key, Maker(contents), {"what": key})


def used_long_ago(cache: DiskCache, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache.root / "entries" / key / MANIFEST, (then, then))
