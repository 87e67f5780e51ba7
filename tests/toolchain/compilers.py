"""Compilers that do not do what they should."""

from __future__ import annotations

from pathlib import Path


def failing(folder: Path) -> Path:
    """One that knows its version, and compiles nothing."""
    script = folder / "failing-c++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo failing 1.0 && exit 0\necho no such luck >&2\nexit 3\n')
    script.chmod(0o755)
    return script


def writing_garbage(folder: Path) -> Path:
    """One that says it succeeded; what it writes is text."""
    script = folder / "garbage-c++"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo garbage 1.0 && exit 0\n'
        'while [ "$1" != -o ]; do shift; done\necho no library > "$2"\n'
    )
    script.chmod(0o755)
    return script
