"""Where a command writes to, checked before the work begins: what takes minutes must not fail at its last step."""

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
    """A file to write, in a folder that exists; its name ends with one of the endings, where there are some."""

    name = "file"

    def __init__(self, *endings: str) -> None:
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path of that text."""
        path = Path(value)
        if path.is_dir():
            raise SardonyxError(f"{path} is a folder, and a file is written", hint="name a file in it")
        if self.endings and path.suffix not in self.endings:
            raise SardonyxError(f"{path} is no file that this writes", hint=f"use {' or '.join(self.endings)}")
        if not path.parent.is_dir():
            raise SardonyxError(f"there is no folder {path.parent}", hint=f"mkdir -p {path.parent}")
        _check_writable(path)
        return path


class OutputFolder(click.ParamType):  # type: ignore[type-arg]  # older versions of click have none
    """A folder to write; those it is in are made, too.

    With `over`, one that exists must be empty, or have a file of that name, by which it is known as an earlier one.
    """

    name = "folder"

    def __init__(self, *, over: str | None = None) -> None:
        self.over = over

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path of that text."""
        path = Path(value)
        file = next((x for x in (path, *path.parents) if x.is_file()), None)
        if file is not None:
            raise SardonyxError(f"{file} is a file, and a folder is written", hint="name another folder")
        if self.over and path.is_dir() and any(path.iterdir()) and not (path / self.over).is_file():
            raise SardonyxError(f"{path} has files that this did not write", hint="name another folder")
        _check_writable(path)
        return path


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to whose files are moved to their place at the end: all of them, or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.absolute().name}.") as beside:
        yield Path(beside)
        folder.mkdir(exist_ok=True)
        for path in Path(beside).iterdir():
            shutil.move(path, folder / path.name)


def _check_writable(path: Path) -> None:
    there = next(x for x in (path, *path.absolute().parents) if x.exists())
    if not os.access(there, os.W_OK):
        raise SardonyxError(f"{path} cannot be written", hint="name a place that you may write to")
