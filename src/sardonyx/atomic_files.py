"""Files written whole, and to nowhere else: a link that someone left in their place is replaced, not followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` at the end; whoever looks there never sees half of it."""
    beside = path.with_name(f".{uuid4().hex}.part")
    try:
        with beside.open("xb") as file:  # x: never a file or a link that is there already
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder, "a.txt"), "hello")
    ...     Path(folder, "a.txt").read_text()
    'hello'
    """
    with atomic_write(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
