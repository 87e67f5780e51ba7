"""The disk cache: folders of files by key, verified, bounded in size, shared between processes.

An entry is written to a temporary folder under a lock, gets a manifest with the digest of every file, and is renamed to
its final place atomically. A process that dies meanwhile leaves only an abandoned temporary folder.
"""

from __future__ import annotations

import errno
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
from typing import TypeAlias
from uuid import uuid4

from filelock import FileLock, Timeout
from platformdirs import user_cache_path

from sardonyx.cache.manifest import MANIFEST, DamagedEntry, foreign_writers, read_manifest, verify, write_manifest
from sardonyx.errors import SardonyxError
from sardonyx.options import Options
from sardonyx.telemetry.progress import show_progress

log = logging.getLogger(__name__)

Make: TypeAlias = Callable[[Path], None]

_JUST_USED = 60.0
"""Seconds for which an entry that was returned is not evicted: the caller may still be reading it."""
_WARN_AFTER = 5.0
"""Seconds of waiting for another process before a warning."""
_STALE = 3600.0
"""Seconds after which an abandoned temporary folder is deleted."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_LITTLE_ROOM = 2**20


class UnusableCache(SardonyxError):
    """The folder cannot be used as a cache; callers work without one."""


@dataclass(frozen=True)
class Entry:
    """A cache entry; the fields are keys of `sardonyx cache ls --json`."""

    key: str
    bytes: int
    made: float
    used: float
    about: Mapping[str, str]


def default_cache(options: Options) -> DiskCache | None:
    """Return the cache that the options choose, by default in the user's cache folder; None if it is disabled."""
    if options.cache_dir == "" or not options.cache_bytes:
        return None
    cache = DiskCache(cache_folder(options.cache_dir), options.cache_bytes)
    try:
        cache.check()
    except UnusableCache as error:
        _warn_once(cache.root, error)
        return None
    return cache


def cache_folder(folder: str | None) -> Path:
    """Return the given folder, or by default `sardonyx` in the user's cache folder."""
    return Path(folder).expanduser().absolute() if folder else user_cache_path("sardonyx", appauthor=False)


class DiskCache:
    """Entries under `root`, of `limit` bytes in total; the least recently used are evicted first.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = DiskCache(Path(folder), 2**20)
    ...     entry = cache.get_or_make("ab12", lambda folder: (folder / "a.txt").write_text("hello"), {"what": "a word"})
    ...     print((cache.get("ab12") / "a.txt").read_text(), cache.get("ab13"))
    hello None
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root, self.limit = root, limit
        self._entries, self._making, self._locks = root / "entries", root / "making", root / "locks"

    # Lookup

    def get(self, key: str) -> Path | None:
        """Return the folder of a key, verified byte by byte and marked as used; None if it is missing or damaged."""
        try:
            self.check()
            return self._verified(key) or self._drop_damaged(key)
        except UnusableCache as error:
            _warn_once(self.root, error)
            return None

    def get_or_make(self, key: str, make: Make, about: Mapping[str, str], *, stale: str | None = None) -> Path:
        """Return the folder of a key. If there is none, `make` writes one, while other processes wait.

        If the cache cannot be written, `make` writes to a temporary folder that is deleted when the process ends.
        `stale` is the `generation` of an entry that turned out to be unusable: it is replaced, if it is still there.
        """
        try:
            self.check()
            folder = None if stale else self._verified(key)
            return folder or self._make_locked(key, make, about, stale)
        except UnusableCache as error:
            _warn_once(self.root, error)
            return _uncached(make)

    def put(self, key: str, make: Make, about: Mapping[str, str]) -> None:
        """Store what `make` writes, unless the key exists; a failure is logged and ignored."""
        try:
            self.check()
            if self._verified(key) is None:
                self._make_locked(key, make, about, None)
        except (UnusableCache, OSError) as error:
            _warn_once(self.root, error)

    def generation(self, key: str) -> str | None:
        """Return an identifier that changes each time the entry is written; None if there is no entry."""
        try:
            return str(self._folder(key).stat().st_mtime_ns)
        except OSError:
            return None

    def entries(self) -> list[Entry]:
        """Return every entry that has a manifest, most recently used first."""
        entries = [self._entry(folder) for folder in _folders(self._entries)]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.used)

    def size(self) -> int:
        """Return the total bytes of all entries."""
        return sum(entry.bytes for entry in self.entries())

    # Eviction

    def prune(self, limit: int) -> int:
        """Evict least recently used entries until at most `limit` bytes remain; return the bytes freed.

        Entries that are being written, or were returned in the last minute, stay.
        """
        self._sweep()
        entries = self.entries()
        before = left = sum(entry.bytes for entry in entries)
        for entry in reversed(entries):
            if left <= limit or time.time() - entry.used < _JUST_USED:
                break
            if self._remove_if_free(entry.key):
                log.info("evicted %s from the cache", _label(entry))
                left -= entry.bytes
        return before - left

    def clear(self) -> int:
        """Delete all entries that no process is writing; return the bytes freed."""
        sizes = {entry.key: entry.bytes for entry in self.entries()}
        dropped = [folder.name for folder in _folders(self._entries) if self._remove_if_free(folder.name)]
        self._sweep(older_than=0.0)
        return sum(sizes.get(key, 0) for key in dropped)

    def drop(self, key: str) -> None:
        """Delete an entry."""
        try:
            with self._lock(key):
                self._remove(key)
        except UnusableCache as error:
            _warn_once(self.root, error)

    # The folder itself

    def check(self) -> None:
        """Raise `UnusableCache` if other users can write to the folder: they could make us run their code."""
        for folder in (self.root, self._entries, self._making, self._locks):
            self._check_folder(folder)

    def _check_folder(self, folder: Path) -> None:
        try:
            status = folder.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnusableCache(f"{folder} cannot be read: {error.strerror}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise UnusableCache(f"{folder} is not a folder", hint=_OTHER_FOLDER)
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            raise UnusableCache(f"{folder} belongs to another user", hint=_OTHER_FOLDER)
        if foreign_writers(status):
            raise UnusableCache(
                f"other users can write to {folder}",
                hint=f"chmod go-w {folder}, and delete its content: other users may have written it",
            )

    def _prepare(self) -> None:
        with _wrap_disk_errors():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._entries, self._making, self._locks):
                folder.mkdir(mode=0o700, exist_ok=True)
        self.check()

    def _folder(self, key: str) -> Path:
        if not re.fullmatch(r"[0-9a-z]{1,128}", key):
            raise ValueError(f"{key!r} is not a key: use lowercase letters and digits")
        return self._entries / key

    @contextmanager
    def _lock(self, key: str, timeout: float = -1) -> Iterator[None]:
        """Hold the lock of a key; by default wait for it without a limit."""
        self._prepare()
        lock = FileLock(self._locks / f"{key}.lock", mode=0o600)
        with _wrap_disk_errors(), show_progress("waiting for another process that builds the same entry"):
            _acquire(lock, timeout)
        try:
            yield
        finally:
            lock.release()

    # One entry

    def _verified(self, key: str) -> Path | None:
        """Return the folder of an entry if it exists and is undamaged."""
        folder = self._folder(key)
        try:
            verify(folder, key)
        except (DamagedEntry, OSError):
            return None
        with suppress(OSError):  # on a read-only disk
            os.utime(folder / MANIFEST)
        return folder

    def _drop_damaged(self, key: str) -> Path | None:
        """Delete a damaged entry, unless another process has replaced it meanwhile; return the entry if so."""
        if not self._folder(key).exists():
            return None
        with self._lock(key):
            folder = self._verified(key)
            if folder is None:
                self._discard(key)
        return folder

    def _discard(self, key: str) -> None:
        """Delete a damaged entry and log the damage; the caller holds its lock."""
        folder = self._folder(key)
        if not folder.exists():
            return
        try:
            verify(folder, key)
        except (DamagedEntry, OSError) as error:
            log.warning("deleted the damaged entry %s of the cache %s: %s", key[:16], self.root, error)
            self._remove(key)

    def _make_locked(self, key: str, make: Make, about: Mapping[str, str], stale: str | None) -> Path:
        with self._lock(key):
            if stale and self.generation(key) == stale:
                self._remove(key)
            folder = self._verified(key)
            if folder is not None:
                return folder
            self._discard(key)
            for abandoned in self._making.glob(f"{key}.*"):  # its process died: we hold the lock
                shutil.rmtree(abandoned, ignore_errors=True)
            folder = self._make(key, make, about)
        self.prune(self.limit)
        return folder

    def _make(self, key: str, make: Make, about: Mapping[str, str]) -> Path:
        with _wrap_disk_errors():
            making = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=self._making))
        try:
            self._run(make, making)
            with _wrap_disk_errors():
                write_manifest(making, key, about)
                making.rename(self._folder(key))
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return self._folder(key)

    def _run(self, make: Make, folder: Path) -> None:
        """Call `make`; raise `UnusableCache` for failures due to a full disk or a deleted folder."""
        try:
            make(folder)
        except (OSError, SardonyxError) as error:
            if not folder.is_dir():
                raise UnusableCache(f"{folder} was deleted while it was being written") from error
            full = isinstance(error, OSError) and error.errno in _NO_ROOM
            if full or shutil.disk_usage(folder).free < _LITTLE_ROOM:
                raise UnusableCache(f"the disk is full: {error}") from error
            raise

    def _remove(self, key: str) -> None:
        """Move an entry away atomically, then delete it; the caller holds its lock."""
        with _wrap_disk_errors():
            aside = self._making / f"dropped.{uuid4().hex}"
            with suppress(FileNotFoundError):
                self._folder(key).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def _remove_if_free(self, key: str) -> bool:
        try:
            with self._lock(key, 0):
                self._remove(key)
                (self._locks / f"{key}.lock").unlink(missing_ok=True)  # while held: waiting processes check again
        except (Timeout, OSError, ValueError):
            return False
        except UnusableCache as error:
            _warn_once(self.root, error)
            return False
        return True

    def _sweep(self, older_than: float = _STALE) -> None:
        """Delete entries without a readable manifest, and abandoned temporary folders."""
        for folder in _folders(self._entries):
            if self._entry(folder) is None:
                self._remove_if_free(folder.name)
        for abandoned in _folders(self._making):
            key = abandoned.name.partition(".")[0]
            with suppress(OSError, UnusableCache):
                if abs(time.time() - abandoned.stat().st_mtime) >= older_than:  # or from a clock that was ahead
                    with self._lock(key, 0):
                        shutil.rmtree(abandoned, ignore_errors=True)

    def _entry(self, folder: Path) -> Entry | None:
        try:
            manifest = read_manifest(folder, folder.name)
            used = _last_used((folder / MANIFEST).stat().st_mtime)
        except (DamagedEntry, OSError):
            return None
        size = sum(file["bytes"] for file in manifest["files"].values())
        return Entry(folder.name, size, manifest["made"], used, manifest["about"])


_OTHER_FOLDER = 'choose another folder by options={"cache_dir": ...} or SARDONYX_CACHE_DIR'


def _label(entry: Entry) -> str:
    return " ".join([entry.key[:16], *entry.about.values()])


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as items:
            return [Path(item.path) for item in items if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _uncached(make: Make) -> Path:
    """Call `make` with a temporary folder that is deleted when the process ends."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="sardonyx-")
        _temporary_folders.append(folder)
        make(Path(folder.name))
    except OSError as error:
        raise UnusableCache(
            f"neither the cache nor a temporary folder can be written: {error}",
            hint="free disk space, or set TMPDIR",
        ) from error
    return Path(folder.name)


def _last_used(then: float) -> float:
    """Return the time of last use; a time in the future counts as the oldest, or it would never be evicted."""
    return then if then <= time.time() + _JUST_USED else 0.0


def _acquire(lock: FileLock, timeout: float) -> None:
    """Acquire a lock; when waiting without a limit, log a warning after a while."""
    try:
        lock.acquire(_WARN_AFTER if timeout < 0 else timeout)
    except Timeout:
        if timeout >= 0:
            raise
        log.warning("waiting for another process that builds the same entry; it holds the lock %s", lock.lock_file)
        lock.acquire(-1)


_temporary_folders: list[tempfile.TemporaryDirectory[str]] = []


# Disk errors


@contextmanager
def _wrap_disk_errors() -> Iterator[None]:
    try:
        yield
    except Timeout:
        raise
    except (OSError, NotImplementedError, DamagedEntry) as error:
        raise UnusableCache(f"it cannot be written: {error}") from error


_warned: set[Path] = set()


def _warn_once(root: Path, error: Exception) -> None:
    if root not in _warned:
        _warned.add(root)
        log.warning("the cache %s is not used: %s", root, error)
