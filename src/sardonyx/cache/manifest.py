"""Manifests of cache entries: files with their digests, which no other user can write to."""

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
"""Seconds after which any further edit changes a file's times, however coarse the file system's clock."""


class DamagedEntry(Exception):
    """An entry differs from what was written."""


def foreign_writers(status: os.stat_result) -> str:
    """Return why other users can write to a file or folder; empty if only we and the administrator can."""
    if not hasattr(os, "getuid"):
        return ""
    if status.st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    return "can be written by other users" if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def write_manifest(folder: Path, key: str, about: Mapping[str, str]) -> None:
    """Make the files private, and write the manifest."""
    files = {}
    for parent, _, _ in os.walk(folder):
        Path(parent).chmod(0o700)
    for name, status in _files(folder).items():
        path = folder / name
        path.chmod(stat.S_IMODE(status.st_mode) & 0o700 | 0o600)
        files[name] = {"bytes": status.st_size, "sha256": _digest(path)}
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
    """Raise if another user can have edited a file."""
    for path in (folder, *folder.rglob("*")):
        reason = foreign_writers(path.lstat())
        if reason and not path.is_symlink():  # a link's mode means nothing; `_files` refuses links
            raise DamagedEntry(f"{path.name} {reason}")


def _files(folder: Path) -> dict[str, os.stat_result]:
    """Return the files below a folder except the manifest, by relative path; links and special files raise."""
    files: dict[str, os.stat_result] = {}
    for parent, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise DamagedEntry(f"{name} is not a regular file")
            files[path.relative_to(folder).as_posix()] = status
    files.pop(MANIFEST, None)
    return files


def read_manifest(folder: Path, key: str) -> dict[str, Any]:
    """Return the manifest; raise unless it is valid and for this key."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        is_valid = (
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
    if not is_valid:
        raise DamagedEntry("its manifest is for another entry or version")
    return manifest  # type: ignore[no-any-return]  # JSON


_verified: dict[Path, object] = {}
"""Entries that this process has verified, with the file times at that moment."""


def verify(folder: Path, key: str) -> None:
    """Raise unless the folder holds exactly the files in its manifest, unmodified and not writable by others."""
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
        raise DamagedEntry(f"{path.name} was modified")


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
