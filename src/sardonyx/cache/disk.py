"""Folders of files kept for other processes: found by key, checked, bounded, each written by one process only.

A folder is written beside the others under a lock, gets a manifest with the digest of every file, and is moved to its
place in one step. A process that dies meanwhile leaves nothing but a folder that is not in its place.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from sardonyx.cache.machine import versions
from sardonyx.diagnose.progress import showing
from sardonyx.errors import SardonyxError
from sardonyx.options import Options

log = logging.getLogger(__name__)

Make: TypeAlias = Callable[[Path], None]

MANIFEST = "manifest.json"
_FORMAT = 1
_JUST_USED = 60.0
"""Seconds for which an entry that was handed out is not dropped: its new owner may still be reading it."""
_STALE = 3600.0
"""Seconds after which a folder that is not in its place, and that nobody writes to, is thrown away."""
_SETTLED = 2.0
"""Seconds after which a file's times tell of every further edit, however coarse the clock of the file system."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_LITTLE_ROOM = 2**20


class Unusable(SardonyxError):
    """The folder cannot serve as a cache: whoever wanted it works without one."""


class _Damaged(Exception):
    """An entry is not what was written."""


@dataclass(frozen=True)
class Entry:
    """What is kept under one key."""

    key: str
    bytes: int
    made: float
    used: float
    about: Mapping[str, str]


def default_cache(options: Options) -> DiskCache | None:
    """The cache that the options choose: by default in the user's cache folder; None if there is to be none."""
    if options.cache_dir == "" or not options.cache_bytes:
        return None
    cache = DiskCache(place(options.cache_dir), options.cache_bytes)
    try:
        cache.check()
    except Unusable as error:
        _warn_once(cache.root, error)
        return None
    return cache


def place(folder: str | None) -> Path:
    """Where a cache is: the folder given, or one of ours in the user's cache folder."""
    return Path(folder).expanduser().absolute() if folder else user_cache_path("sardonyx", appauthor=False)


class DiskCache:
    """Entries under `root`, of `limit` bytes in all; what was used longest ago is dropped first.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = DiskCache(Path(folder), 2**20)
    ...     kept = cache.get_or_make("ab12", lambda folder: (folder / "a.txt").write_text("hello"), {"what": "a word"})
    ...     print((cache.get("ab12") / "a.txt").read_text(), cache.get("ab13"))
    hello None
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit
        self._entries, self._making, self._locks = root / "entries", root / "making", root / "locks"

    # What is asked for

    def get(self, key: str) -> Path | None:
        """The folder kept under a key, checked byte by byte and marked as used; None if there is none that is whole."""
        try:
            self.check()
            return self._checked(key) or self._after_repair(key)
        except Unusable as error:
            _warn_once(self.root, error)
            return None

    def get_or_make(self, key: str, make: Make, about: Mapping[str, str], *, unlike: str | None = None) -> Path:
        """The folder kept under a key. If there is none, `make` writes one; others who want it wait meanwhile.

        Where the cache cannot be written, `make` writes to a folder that is gone at the end of the process. `unlike` is
        what `edition` told of an entry that turned out to be useless: it is dropped, if it is still there.
        """
        try:
            self.check()
            found = None if unlike else self._checked(key)
            return found or self._make_alone(key, make, about, unlike)
        except Unusable as error:
            _warn_once(self.root, error)
            return _uncached(make)

    def edition(self, key: str) -> str | None:
        """What differs each time that an entry is made; None if it is not there."""
        try:
            return str(self._folder(key).stat().st_mtime_ns)
        except OSError:
            return None

    def entries(self) -> list[Entry]:
        """Every entry that has a manifest, the most recently used first."""
        found = [self._entry(folder) for folder in _folders(self._entries)]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used)

    def size(self) -> int:
        """The bytes of all entries."""
        return sum(entry.bytes for entry in self.entries())

    # What is thrown away

    def prune(self, limit: int) -> int:
        """Drop what was used longest ago until the rest has at most `limit` bytes; how many bytes that was.

        What is being made, or was handed out in the last minute, stays.
        """
        self._sweep()
        entries = self.entries()
        before = left = sum(entry.bytes for entry in entries)
        for entry in reversed(entries):
            if left <= limit or time.time() - entry.used < _JUST_USED:
                break
            if self._remove_if_free(entry.key):
                log.info("dropped %s from the cache, for room", _described(entry))
                left -= entry.bytes
        return before - left

    def clear(self) -> int:
        """Drop everything that nobody is making right now; how many bytes that was."""
        sizes = {entry.key: entry.bytes for entry in self.entries()}
        dropped = [folder.name for folder in _folders(self._entries) if self._remove_if_free(folder.name)]
        self._sweep(older_than=0.0)
        return sum(sizes.get(key, 0) for key in dropped)

    def drop(self, key: str) -> None:
        """Drop an entry."""
        try:
            with self._lock(key):
                self._remove(key)
        except Unusable as error:
            _warn_once(self.root, error)

    # The folder itself

    def check(self) -> None:
        """Raise `Unusable` if others can write to the folder: they could have us run their code."""
        try:
            found = self.root.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise Unusable(f"{self.root} cannot be read: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise Unusable(f"{self.root} is no folder", hint=_ANOTHER)
        if hasattr(os, "getuid"):
            if found.st_uid != os.getuid():
                raise Unusable(f"{self.root} belongs to another user", hint=_ANOTHER)
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise Unusable(f"other users can write to {self.root}", hint=f"chmod go-w {self.root}")

    def _prepare(self) -> None:
        with _or_unusable():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._entries, self._making, self._locks):
                folder.mkdir(mode=0o700, exist_ok=True)
        self.check()

    def _folder(self, key: str) -> Path:
        if not re.fullmatch(r"[0-9a-z]{1,128}", key):
            raise ValueError(f"{key!r} is no key: use small letters and digits")
        return self._entries / key

    @contextmanager
    def _lock(self, key: str, timeout: float = -1) -> Iterator[None]:
        """Hold the key's lock; by default wait for whoever has it."""
        self._prepare()
        lock = FileLock(self._locks / f"{key}.lock", timeout=timeout, mode=0o600)
        with _or_unusable(), showing("waiting for another process that makes the same"):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    # One entry

    def _checked(self, key: str) -> Path | None:
        """The entry's folder, if it is whole."""
        folder = self._folder(key)
        try:
            _verify(folder, key)
        except (_Damaged, OSError):
            return None
        with suppress(OSError):  # of a disk that can only be read
            os.utime(folder / MANIFEST)
        return folder

    def _after_repair(self, key: str) -> Path | None:
        """Drop an entry that is not whole, unless someone has made it anew meanwhile; the entry if so."""
        if not self._folder(key).exists():
            return None
        with self._lock(key):
            found = self._checked(key)
            if found is None:
                self._discard(key)
        return found

    def _discard(self, key: str) -> None:
        """Drop an entry that is not whole, and say what is wrong with it; the caller holds its lock."""
        folder = self._folder(key)
        if not folder.exists():
            return
        try:
            _verify(folder, key)
        except (_Damaged, OSError) as error:
            log.warning("the entry %s of the cache in %s is dropped: %s", key[:16], self.root, error)
            self._remove(key)

    def _make_alone(self, key: str, make: Make, about: Mapping[str, str], unlike: str | None) -> Path:
        with self._lock(key):
            if unlike and self.edition(key) == unlike:
                self._remove(key)
            found = self._checked(key)
            if found is not None:
                return found
            self._discard(key)
            for left in self._making.glob(f"{key}.*"):  # by one that died: nobody else has the lock
                shutil.rmtree(left, ignore_errors=True)
            found = self._make(key, make, about)
        self.prune(self.limit)
        return found

    def _make(self, key: str, make: Make, about: Mapping[str, str]) -> Path:
        with _or_unusable():
            making = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self._making))
        try:
            self._run(make, making)
            with _or_unusable():
                _seal(making, key, about)
                making.rename(self._folder(key))
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return self._folder(key)

    def _run(self, make: Make, folder: Path) -> None:
        """Have it made. A failure where the disk is full may be the disk's: then it is tried elsewhere."""
        try:
            make(folder)
        except (OSError, SardonyxError) as error:
            full = isinstance(error, OSError) and error.errno in _NO_ROOM
            if full or shutil.disk_usage(folder).free < _LITTLE_ROOM:
                raise Unusable(f"there is no room: {error}") from error
            raise

    def _remove(self, key: str) -> None:
        """Take an entry out of its place in one step, then delete it; the caller holds its lock."""
        with _or_unusable():
            aside = self._making / f"dropped.{uuid4().hex}"
            with suppress(FileNotFoundError):
                self._folder(key).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_if_free(self, key: str) -> bool:
        try:
            with self._lock(key, 0):
                self._remove(key)
                (self._locks / f"{key}.lock").unlink(missing_ok=True)  # while it is held: who waits for it looks again
        except (Timeout, OSError, ValueError):
            return False
        except Unusable as error:
            _warn_once(self.root, error)
            return False
        return True

    def _sweep(self, older_than: float = _STALE) -> None:
        """Delete entries without a readable manifest, and what processes that died have left."""
        for folder in _folders(self._entries):
            if self._entry(folder) is None:
                self._remove_if_free(folder.name)
        for left in _folders(self._making):
            key = left.name.partition(".")[0]
            with suppress(OSError, Unusable):
                if time.time() - left.stat().st_mtime >= older_than:
                    with self._lock(key, 0):
                        shutil.rmtree(left, ignore_errors=True)

    def _entry(self, folder: Path) -> Entry | None:
        try:
            manifest = _read_manifest(folder, folder.name)
            used = (folder / MANIFEST).stat().st_mtime
        except (_Damaged, OSError):
            return None
        size = sum(file["bytes"] for file in manifest["files"].values())
        return Entry(folder.name, size, manifest["made"], used, manifest["about"])


_ANOTHER = 'choose another folder by options={"cache_dir": ...} or SARDONYX_CACHE_DIR'


def _described(entry: Entry) -> str:
    return " ".join([entry.key[:16], *entry.about.values()])


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as found:
            return [Path(item.path) for item in found if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _uncached(make: Make) -> Path:
    """What `make` writes, in a folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="sardonyx-")
    _lasting.append(folder)
    make(Path(folder.name))
    return Path(folder.name)


_lasting: list[tempfile.TemporaryDirectory[str]] = []


# Manifests


def _seal(folder: Path, key: str, about: Mapping[str, str]) -> None:
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
    path.write_text(json.dumps(manifest, indent=1))
    path.chmod(0o600)


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
                raise _Damaged(f"{name} is no plain file")
            found[path.relative_to(folder).as_posix()] = status
    found.pop(MANIFEST, None)
    return found


def _read_manifest(folder: Path, key: str) -> dict[str, Any]:
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
        raise _Damaged("it has no manifest") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _Damaged(f"its manifest cannot be read ({error!r})") from error
    if not right:
        raise _Damaged("its manifest is of another entry, or of another version")
    return manifest  # type: ignore[no-any-return]  # JSON


_settled: dict[Path, object] = {}
"""Entries that this process has hashed, with what tells whether a file was touched since."""


def _verify(folder: Path, key: str) -> None:
    """Raise unless the folder holds exactly the files that its manifest lists, with the same contents."""
    manifest, files = _read_manifest(folder, key), _files(folder)
    if set(files) != set(manifest["files"]):
        wrong = sorted(set(files) ^ set(manifest["files"]))
        raise _Damaged(f"{wrong[0]} is {'missing' if wrong[0] in manifest['files'] else 'not in its manifest'}")
    touched = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in sorted(files.items())]
    state = (manifest, touched)
    if _settled.get(folder) == state:
        return
    for name, status in files.items():
        _check_file(folder / name, status, manifest["files"][name])
    if all(time.time() - max(s.st_mtime, s.st_ctime) > _SETTLED for s in files.values()):
        _settled[folder] = state


def _check_file(path: Path, status: os.stat_result, listed: Mapping[str, Any]) -> None:
    if status.st_size != listed["bytes"]:
        raise _Damaged(f"{path.name} has {status.st_size} bytes instead of {listed['bytes']}")
    if _digest(path) != listed["sha256"]:
        raise _Damaged(f"{path.name} has other contents than were written")


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# What the disk refuses


@contextmanager
def _or_unusable() -> Iterator[None]:
    try:
        yield
    except Timeout:
        raise
    except (OSError, NotImplementedError, _Damaged) as error:
        raise Unusable(f"it cannot be written: {error}") from error


_warned: set[Path] = set()


def _warn_once(root: Path, error: Unusable) -> None:
    if root not in _warned:
        _warned.add(root)
        log.warning("nothing is kept in the cache %s: %s", root, error)
