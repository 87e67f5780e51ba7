"""Folders of files kept for other processes: found by key, checked, bounded, each written by one process only.

A folder is written beside the others under a lock, gets a manifest with the digest of every file, and is moved to its
place in one step. A process that dies meanwhile leaves nothing but a folder that is not in its place.
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
"""Seconds for which an entry that was handed out is not dropped: its new owner may still be reading it."""
_WARN_AFTER = 5.0
"""Seconds of waiting for another process after which that is said."""
_STALE = 3600.0
"""Seconds after which a folder that is not in its place, and that nobody writes to, is thrown away."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
_LITTLE_ROOM = 2**20


class UnusableCache(SardonyxError):
    """The folder cannot serve as a cache: whoever wanted it works without one."""


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
    cache = DiskCache(cache_folder(options.cache_dir), options.cache_bytes)
    try:
        cache.check()
    except UnusableCache as error:
        _warn_once(cache.root, error)
        return None
    return cache


def cache_folder(folder: str | None) -> Path:
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
        except UnusableCache as error:
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
        except UnusableCache as error:
            _warn_once(self.root, error)
            return _uncached(make)

    def keep(self, key: str, make: Make, about: Mapping[str, str]) -> None:
        """Keep what `make` writes, for other processes; where that is not possible, say so and go on."""
        try:
            self.check()
            if self._checked(key) is None:
                self._make_alone(key, make, about, None)
        except (UnusableCache, OSError) as error:
            _warn_once(self.root, error)

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
                log.info("dropped %s from the cache, for room", _label(entry))
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
        except UnusableCache as error:
            _warn_once(self.root, error)

    # The folder itself

    def check(self) -> None:
        """Raise `UnusableCache` if others can write to the folder: they could have us run their code."""
        for folder in (self.root, self._entries, self._making, self._locks):
            self._check_folder(folder)

    def _check_folder(self, folder: Path) -> None:
        try:
            found = folder.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnusableCache(f"{folder} cannot be read: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode):
            raise UnusableCache(f"{folder} is no folder", hint=_OTHER_FOLDER)
        if hasattr(os, "getuid") and found.st_uid != os.getuid():
            raise UnusableCache(f"{folder} belongs to another user", hint=_OTHER_FOLDER)
        if foreign_writers(found):
            raise UnusableCache(
                f"other users can write to {folder}",
                hint=f"chmod go-w {folder}, and delete what is in it: it may be theirs",
            )

    def _prepare(self) -> None:
        with _wrap_disk_errors():
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
        lock = FileLock(self._locks / f"{key}.lock", mode=0o600)
        with _wrap_disk_errors(), show_progress("waiting for another process that makes the same"):
            _acquire(lock, timeout)
        try:
            yield
        finally:
            lock.release()

    # One entry

    def _checked(self, key: str) -> Path | None:
        """The entry's folder, if it is whole."""
        folder = self._folder(key)
        try:
            verify(folder, key)
        except (DamagedEntry, OSError):
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
            verify(folder, key)
        except (DamagedEntry, OSError) as error:
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
        """Have it made. A failure where the disk is full, or the folder gone, is the disk's: it is tried elsewhere."""
        try:
            make(folder)
        except (OSError, SardonyxError) as error:
            if not folder.is_dir():
                raise UnusableCache(f"{folder} was deleted while it was written to") from error
            full = isinstance(error, OSError) and error.errno in _NO_ROOM
            if full or shutil.disk_usage(folder).free < _LITTLE_ROOM:
                raise UnusableCache(f"there is no room: {error}") from error
            raise

    def _remove(self, key: str) -> None:
        """Take an entry out of its place in one step, then delete it; the caller holds its lock."""
        with _wrap_disk_errors():
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
        except UnusableCache as error:
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
            with suppress(OSError, UnusableCache):
                if abs(time.time() - left.stat().st_mtime) >= older_than:  # or of a clock that was ahead
                    with self._lock(key, 0):
                        shutil.rmtree(left, ignore_errors=True)

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
        with os.scandir(parent) as found:
            return [Path(item.path) for item in found if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _uncached(make: Make) -> Path:
    """What `make` writes, in a folder that lasts as long as the process."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="sardonyx-")
        _temporary_folders.append(folder)
        make(Path(folder.name))
    except OSError as error:
        raise UnusableCache(
            f"neither the cache nor a temporary folder can be written: {error}",
            hint="make room, or let TMPDIR name one",
        ) from error
    return Path(folder.name)


def _last_used(then: float) -> float:
    """When something was used; one that a clock ahead of ours marked counts as the oldest, or nothing would drop it."""
    return then if then <= time.time() + _JUST_USED else 0.0


def _acquire(lock: FileLock, timeout: float) -> None:
    """Take a lock; whoever waits for it without an end says after a while what for."""
    try:
        lock.acquire(_WARN_AFTER if timeout < 0 else timeout)
    except Timeout:
        if timeout >= 0:
            raise
        log.warning("waiting for another process that makes the same; it holds the lock %s", lock.lock_file)
        lock.acquire(-1)


_temporary_folders: list[tempfile.TemporaryDirectory[str]] = []


# What the disk refuses


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
        log.warning("nothing is kept in the cache %s: %s", root, error)
