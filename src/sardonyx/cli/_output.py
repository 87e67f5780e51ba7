"""Output paths of commands, checked before the work begins, so that it does not fail at the last step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from sardonyx.errors import SardonyxError


class OutputFile(click.ParamType):  # type: ignore[type-arg]  # older versions of click have none
    """A click type for a file to write, in an existing folder, with one of the given suffixes if any."""

    name = "file"

    def __init__(self, *suffixes: str) -> None:
        self.suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raise if it cannot be written."""
        path = Path(value)
        if path.is_dir():
            raise SardonyxError(f"{path} is a folder, but a file is written", hint="name a file in it")
        if self.suffixes and path.suffix not in self.suffixes:
            raise SardonyxError(f"{path} has an unsupported suffix", hint=f"use {' or '.join(self.suffixes)}")
        if not path.parent.is_dir():
            raise SardonyxError(f"there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")
        _check_writable(path)
        return path


class OutputFolder(click.ParamType):  # type: ignore[type-arg]  # older versions of click have none
    """A click type for a folder to write; parent folders are created.

    With `over`, an existing folder must be empty or contain a file of that name, from an earlier run.
    """

    name = "folder"

    def __init__(self, *, over: str | None = None) -> None:
        self.over = over

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path; raise if it cannot be written."""
        path = Path(value)
        file = next((x for x in (path, *path.parents) if x.is_file()), None)
        if file is not None:
            raise SardonyxError(f"{file} is a file, but a folder is written", hint="name another folder")
        if self.over and path.is_dir() and any(path.iterdir()) and not (path / self.over).is_file():
            raise SardonyxError(f"{path} has files that this command did not write", hint="name another folder")
        _check_writable(path)
        return path


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files are moved to `folder` on success: all of them, or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.absolute().name}.") as temporary:
        yield Path(temporary)
        folder.mkdir(exist_ok=True)
        for path in Path(temporary).iterdir():
            shutil.move(path, folder / path.name)


def _check_writable(path: Path) -> None:
    existing = next(x for x in (path, *path.absolute().parents) if x.exists())
    if not os.access(existing, os.W_OK):
        raise SardonyxError(f"{path} cannot be written", hint="choose a path with write permission")
