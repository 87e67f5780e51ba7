"""What an entry of the cache consists of: files listed with their digests, which nobody else can write to."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sardonyx.versions import versions

MANIFEST = "manifest.json"
_FORMAT = 1
_STABLE_AFTER = 2.0
"""Seconds after which a file's times tell of every further edit, however coarse the clock of the file system."""


class DamagedEntry(Exception):
    """An entry is not what was written."""


def foreign_writers(status: os.stat_result) -> str:
    """Who else can write to a file or folder; nothing where it is ours, or the administrator's, alone."""
    if not hasattr(os, "getuid"):
        return ""
    if status.st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    return "can be written by other users" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def write_manifest(folder: Path, key: str, about: Mapping[str, str]) -> None:
    """Make what was written private, and write the manifest."""
    files = {}
    for parent, _, _ in os.walk(folder):
        Path(parent).chmod(0o700)
    for name, found in _files(folder).items():
        path = folder / name
        path.chmod(stat.S_IMODE(found.st_mode) & 0o700 | 0o600)
        files[name] = {"bytes": found.st_size, "sha256": _digest(path)}
    manifest = {
        "format": _FORMAT,
        "key": key,
        "made": time.time(),
        "about": dict(about),
        "versions": versions(),
        "files": files,
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    path.chmod(0o600)


def _check_permissions(folder: Path) -> None:
    """Nobody else can have edited anything here."""
    for path in (folder, *folder.rglob("*")):
        who = foreign_writers(path.lstat())
        if who and not path.is_symlink():  # whose mode says nothing, and which is refused as such
            raise DamagedEntry(f"{path.name} {who}")


def _files(folder: Path) -> dict[str, os.stat_result]:
    """Every file below a folder but the manifest, by its path from there; anything else but folders is refused."""
    found: dict[str, os.stat_result] = {}
    for parent, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise DamagedEntry(f"{name} is no plain file")
            found[path.relative_to(folder).as_posix()] = status
    found.pop(MANIFEST, None)
    return found


def read_manifest(folder: Path, key: str) -> dict[str, Any]:
    """The manifest, if it is one of ours for that key."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        right = (
            manifest["format"] == _FORMAT
            and manifest["key"] == key
            and isinstance(manifest["made"], float)
            and all(isinstance(text, str) for text in manifest["about"].values())
            and all(
                isinstance(file["bytes"], int) and isinstance(file["sha256"], str)
                for file in manifest["files"].values()
            )
        )
    except FileNotFoundError:
        raise DamagedEntry("it has no manifest") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedEntry(f"its manifest cannot be read ({error!r})") from error
    if not right:
        raise DamagedEntry("its manifest is of another entry, or of another version")
    return manifest  # type: ignore[no-any-return]  # JSON


_verified: dict[Path, object] = {}
"""Entries that this process has hashed, with what tells whether a file was touched since."""


def verify(folder: Path, key: str) -> None:
    """Raise unless the folder holds exactly the files that its manifest lists, with the same contents, and all ours."""
    _check_permissions(folder)
    manifest, files = read_manifest(folder, key), _files(folder)
    if set(files) != set(manifest["files"]):
        wrong = sorted(set(files) ^ set(manifest["files"]))
        raise DamagedEntry(f"{wrong[0]} is {'missing' if wrong[0] in manifest['files'] else 'not in its manifest'}")
    touched = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in sorted(files.items())]
    state = (manifest, touched)
    if _verified.get(folder) == state:
        return
    for name, status in files.items():
        _check_file(folder / name, status, manifest["files"][name])
    if all(time.time() - max(s.st_mtime, s.st_ctime) > _STABLE_AFTER for s in files.values()):
        _verified[folder] = state


def _check_file(path: Path, status: os.stat_result, listed: Mapping[str, Any]) -> None:
    if status.st_size != listed["bytes"]:
        raise DamagedEntry(f"{path.name} has {status.st_size} bytes instead of {listed['bytes']}")
    if _digest(path) != listed["sha256"]:
        raise DamagedEntry(f"{path.name} has other contents than were written")


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
