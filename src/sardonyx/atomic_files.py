"""Atomic file writes, which replace a symbolic link instead of following it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` on success, so that readers never see a partial file."""
    temporary = path.with_name(f".{uuid4().hex}.part")
    try:
        with temporary.open("xb") as file:  # x: never an existing file or link
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(Path(folder, "a.txt"), "hello")
    ...     Path(folder, "a.txt").read_text()
    'hello'
    """
    with atomic_write(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
