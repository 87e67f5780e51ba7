"""The disk cache: one makes, all get it; what is damaged is made anew; what cannot be kept works all the same."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sardonyx.cache import disk, manifest
from sardonyx.cache.disk import DiskCache, Unusable, default_cache
from sardonyx.cache.manifest import MANIFEST
from sardonyx.errors import EngineError
from sardonyx.options import Options

Damage = Callable[[Path], object]


class Maker:
    """Writes a file of some bytes, and counts how often."""

    def __init__(self, contents: bytes = b"hello") -> None:
        self.contents, self.made = contents, 0

    def __call__(self, folder: Path) -> None:
        self.made += 1
        (folder / "model.bin").write_bytes(self.contents)
        (folder / "more").mkdir(exist_ok=True)
        (folder / "more" / "note.txt").write_text("a note")


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 2**30)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "sardonyx.cache")
    return caplog


def kept(cache: DiskCache, key: str, contents: bytes = b"hello") -> Path:
    return cache.get_or_make(key, Maker(contents), {"what": key})


def used_long_ago(cache: DiskCache, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache.root / "entries" / key / MANIFEST, (then, then))


# Keeping


def test_what_was_made_is_found_and_not_made_again(cache: DiskCache) -> None:
    make = Maker()
    assert cache.get("ab") is None
    first = cache.get_or_make("ab", make, {})
    assert cache.get_or_make("ab", make, {}) == first == DiskCache(cache.root, 1).get("ab")
    assert make.made == 1
    assert (first / "model.bin").read_bytes() == b"hello"
    assert (first / "more" / "note.txt").read_text() == "a note"


def test_asking_makes_no_folders(cache: DiskCache) -> None:
    assert cache.get("ab") is None
    assert (cache.entries(), cache.size()) == ([], 0)
    assert not cache.root.exists()


def test_entries_tell_what_they_are_the_last_used_first(cache: DiskCache) -> None:
    kept(cache, "a1", b"12345")
    kept(cache, "b2")
    used_long_ago(cache, "b2", 10)
    first, second = cache.entries()
    assert (first.key, first.about, first.bytes) == ("a1", {"what": "a1"}, 5 + len("a note"))
    assert second.key == "b2"
    assert cache.size() == first.bytes + second.bytes
    assert first.made <= first.used


def test_everything_is_private_to_the_user(cache: DiskCache) -> None:
    old = os.umask(0)
    try:
        kept(cache, "ab")
    finally:
        os.umask(old)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (cache.root, *cache.root.rglob("*"))}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}


def test_a_failure_while_making_is_the_callers_and_leaves_nothing(cache: DiskCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise EngineError("no")

    with pytest.raises(EngineError, match="no"):
        cache.get_or_make("ab", fail, {})
    assert list(cache.root.glob("*/ab*")) == [cache.root / "locks" / "ab.lock"]
    assert kept(cache, "ab").is_dir()


@pytest.mark.parametrize("key", ["", "../x", "a/b", "A", "."])
def test_a_key_is_no_path(cache: DiskCache, key: str) -> None:
    with pytest.raises(ValueError, match="no key"):
        cache.get(key)


# Damage


def flip_a_byte(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"hellp")


def edit_manifest(**edits: object) -> Damage:
    def edit(folder: Path) -> None:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps({**manifest, **edits}))

    return edit


def link_elsewhere(folder: Path) -> None:
    (folder / "model.bin").rename(folder.parent / "elsewhere")
    (folder / "model.bin").symlink_to(folder.parent / "elsewhere")


DAMAGES: dict[str, Damage] = {
    "a byte flipped": flip_a_byte,
    "truncated": lambda folder: os.truncate(folder / "model.bin", 2),
    "a file missing": lambda folder: (folder / "model.bin").unlink(),
    "a file too many": lambda folder: (folder / "evil.so").write_text("code"),
    "a link in place of a file": link_elsewhere,
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "half a manifest": lambda folder: os.truncate(folder / MANIFEST, 40),
    "a manifest that is no object": lambda folder: (folder / MANIFEST).write_text("[]"),
    "the manifest of another key": edit_manifest(key="cd"),
    "a manifest of another version": edit_manifest(format=0),
    "a manifest without files": edit_manifest(files=None),
    "an empty folder": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_dropped_with_a_warning_and_made_anew(
    cache: DiskCache, warnings: pytest.LogCaptureFixture, damage: Damage
) -> None:
    damage(kept(cache, "ab"))
    assert (kept(cache, "ab", b"anew") / "model.bin").read_bytes() == b"anew"
    assert len(warnings.messages) == 1
    assert "is dropped" in warnings.messages[0]
    assert cache.get("ab") is not None


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_not_found(cache: DiskCache, warnings: pytest.LogCaptureFixture, damage: Damage) -> None:
    folder = kept(cache, "ab")
    damage(folder)
    assert cache.get("ab") is None
    assert not folder.exists()
    assert len(warnings.messages) == 1


@pytest.mark.parametrize("name", ["../../x", "/etc/hostname", "more/../../../../x"])
def test_a_manifest_that_leads_out_of_its_folder_is_refused(cache: DiskCache, tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    folder = kept(cache, "ab")
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    edit_manifest(files={**listed, name: {"bytes": 0, "sha256": empty}})(folder)
    assert cache.get("ab") is None
    assert (tmp_path / "x").exists()


def test_a_file_is_hashed_once_by_a_process_until_it_is_touched(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_SETTLED", -1.0)
    folder, hashed = kept(cache, "ab"), []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path: hashed.append(path.name) or digest(path))
    cache.get("ab"), cache.get("ab")
    assert sorted(hashed) == ["model.bin", "note.txt"]
    time.sleep(0.02)  # longer than the clock of the file system takes to tick
    flip_a_byte(folder)
    assert cache.get("ab") is None


def test_an_edit_right_after_a_check_is_noticed(cache: DiskCache) -> None:
    for _ in range(20):
        folder = kept(cache, "ab")
        assert cache.get("ab") is not None
        flip_a_byte(folder)
        assert cache.get("ab") is None


def test_an_entry_that_was_no_use_is_made_anew_once(cache: DiskCache) -> None:
    kept(cache, "ab", b"useless")
    edition = cache.edition("ab")
    time.sleep(0.02)  # as above
    for make in (Maker(b"better"), Maker(b"never made")):
        folder = cache.get_or_make("ab", make, {}, unlike=edition)
        assert (folder / "model.bin").read_bytes() == b"better"


# Room


def test_what_was_used_longest_ago_is_dropped_first(cache: DiskCache) -> None:
    for age, key in enumerate(["d", "c", "b", "a"], start=1):
        kept(cache, key, bytes(1000))
        used_long_ago(cache, key, 1000 * age)
    assert cache.get("a") is not None
    assert cache.prune(2500) == 2 * 1006
    assert {entry.key for entry in cache.entries()} == {"a", "d"}


def test_making_one_more_drops_the_oldest(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 2500)
    for key in ("a", "b"):
        kept(cache, key, bytes(1000))
        used_long_ago(cache, key, 1000)
    used_long_ago(cache, "a", 2000)
    kept(cache, "c", bytes(1000))
    assert {entry.key for entry in cache.entries()} == {"b", "c"}


def test_what_was_just_handed_out_stays(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1)
    assert kept(cache, "a").is_dir()
    assert kept(cache, "b").is_dir()
    assert {entry.key for entry in cache.entries()} == {"a", "b"}


def test_an_entry_of_the_future_counts_as_the_oldest(cache: DiskCache) -> None:
    for key, seconds in (("a1", 3600), ("b2", -(10**6)), ("c3", 1800)):
        kept(cache, key)
        used_long_ago(cache, key, seconds)
    each = cache.size() // 3
    assert cache.prune(2 * each) == each
    assert [entry.key for entry in cache.entries()] == ["c3", "a1"]
    assert cache.prune(0) == 2 * each


def test_what_a_process_left_in_the_future_is_swept(cache: DiskCache) -> None:
    kept(cache, "ab")
    left = cache.root / "making" / "cd.left"
    left.mkdir()
    os.utime(left, (time.time() + 10**6,) * 2)
    cache.prune(2**30)
    assert not left.exists()


def test_waiting_for_another_process_is_said(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "_PATIENCE", 0.0)
    kept(cache, "ab")
    with cache._lock("cd"):
        waiting = threading.Thread(target=kept, args=(cache, "cd"))
        waiting.start()
        for _ in range(3000):
            if "cd.lock" in warnings.text:
                break
            time.sleep(0.01)
        assert "waiting for another process" in warnings.text
    waiting.join()
    assert cache.get("cd") is not None


def test_what_is_being_made_stays(cache: DiskCache) -> None:
    def make(folder: Path) -> None:
        Maker()(folder)
        other = DiskCache(cache.root, 0)
        other.prune(0)
        other.clear()
        assert (folder / "model.bin").exists()

    assert cache.get_or_make("ab", make, {}).is_dir()


def test_clearing_drops_everything(cache: DiskCache) -> None:
    kept(cache, "a"), kept(cache, "b")
    assert cache.clear() == 2 * (5 + 6)
    assert (cache.entries(), cache.get("a")) == ([], None)
    assert [path for path in cache.root.rglob("*") if path.is_file()] == []
    assert kept(cache, "a").is_dir()


def test_one_entry_is_dropped_by_its_key(cache: DiskCache) -> None:
    kept(cache, "a"), kept(cache, "b")
    cache.drop("a")
    cache.drop("c")
    assert [entry.key for entry in cache.entries()] == ["b"]


# Processes and threads


def children(count: int, work: Callable[[int], None]) -> list[int]:
    """Processes that do some work each, as forks: a new one would import torch first."""
    started = []
    for index in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(index)
                code = 0
            finally:
                os._exit(code)
        started.append(child)
    return started


def exit_codes(started: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]


def test_of_eight_processes_one_makes_and_all_get_it(cache: DiskCache, tmp_path: Path) -> None:
    marks = tmp_path / "marks"

    def make(folder: Path) -> None:
        with marks.open("a") as file:
            file.write("made\n")
        time.sleep(0.2)
        Maker()(folder)

    def work(index: int) -> None:
        assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"

    assert exit_codes(children(8, work)) == [0] * 8
    assert marks.read_text() == "made\n"


def test_of_eight_threads_one_makes_and_all_get_it(cache: DiskCache) -> None:
    make, found = Maker(), []
    threads = [threading.Thread(target=lambda: found.append(cache.get_or_make("ab", make, {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache.get("ab")] * 8
    assert make.made == 1


def test_a_process_killed_while_making_leaves_a_cache_that_works(cache: DiskCache, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def make(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        begun.touch()
        time.sleep(60)

    (child,) = children(1, lambda _: cache.get_or_make("ab", make, {}) and None)
    while not begun.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert exit_codes([child]) == [-signal.SIGKILL]
    assert cache.get("ab") is None
    assert (kept(cache, "ab") / "model.bin").read_bytes() == b"hello"
    assert list((cache.root / "making").iterdir()) == []


def test_what_a_killed_process_left_under_another_key_goes_after_a_while(cache: DiskCache) -> None:
    kept(cache, "ab")
    old, young = cache.root / "making" / "cd.xyz", cache.root / "making" / "ef.xyz"
    for left in (old, young):
        left.mkdir()
        (left / "half").write_text("half")
    os.utime(old, (0, 0))
    cache.prune(2**30)
    assert (old.exists(), young.exists()) == (False, True)


# What the disk refuses


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    cache = DiskCache(root, 2**30)
    with pytest.raises(Unusable, match=f"chmod go-w {root}"):
        cache.check()
    assert cache.get("ab") is None
    assert (kept(cache, "ab") / "model.bin").read_bytes() == b"hello"
    assert default_cache(Options(cache_dir=str(root))) is None
    assert list(root.iterdir()) == []
    assert len(warnings.messages) == 1


def test_a_folder_of_another_user_is_not_used(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(cache, "ab")
    monkeypatch.setattr(os, "getuid", lambda: cache.root.stat().st_uid + 1)
    with pytest.raises(Unusable, match="belongs to another user"):
        cache.check()
    assert cache.get("ab") is None


def opened(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).chmod(0o777)


@pytest.mark.parametrize("path", ["entries", "making", "locks"])
def test_a_folder_within_that_others_can_write_to_is_not_used(cache: DiskCache, path: str) -> None:
    kept(cache, "ab")
    opened(cache.root, path)
    with pytest.raises(Unusable, match=f"other users can write to {cache.root / path}"):
        cache.check()
    assert cache.get("ab") is None


@pytest.mark.parametrize("path", ["", "model.bin", "more", "more/note.txt", MANIFEST])
def test_an_entry_that_others_can_write_to_is_made_anew(
    cache: DiskCache, warnings: pytest.LogCaptureFixture, path: str
) -> None:
    make = Maker()
    opened(cache.get_or_make("ab", make, {}), path)
    assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"
    assert make.made == 2
    assert "can be written by other users" in warnings.text


@pytest.mark.parametrize("path", [".", "model.bin", "more/note.txt", MANIFEST])
@pytest.mark.skipif(os.geteuid() != 0, reason="only the administrator can give files away")
def test_an_entry_of_another_user_is_made_anew(cache: DiskCache, warnings: pytest.LogCaptureFixture, path: str) -> None:
    make = Maker()
    os.chown(cache.get_or_make("ab", make, {}) / path, 12345, 12345)
    cache.get_or_make("ab", make, {})
    assert make.made == 2
    assert "belongs to another user" in warnings.text


def test_a_file_in_place_of_the_folder_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert default_cache(Options(cache_dir=str(tmp_path / "file"))) is None


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_told_once_and_things_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, code: int
) -> None:
    cache, make = DiskCache(tmp_path / "refused" / str(code), 2**30), Maker()
    original = disk.Path.mkdir

    def mkdir(self: Path, *args: object, **kwargs: object) -> None:
        if cache.root in (self, *self.parents):
            raise OSError(code, os.strerror(code), str(self))
        original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.Path, "mkdir", mkdir)
    for made in (1, 2):
        assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"
        assert make.made == made
    assert len(warnings.messages) == 1
    assert os.strerror(code) in warnings.messages[0]


def test_a_disk_that_fills_up_while_making_is_left(cache: DiskCache, warnings: pytest.LogCaptureFixture) -> None:
    def make(folder: Path) -> None:
        if cache.root in folder.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        Maker()(folder)

    assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"
    assert cache.entries() == []
    assert len(warnings.messages) == 1


def test_a_compiler_that_fails_on_a_full_disk_is_tried_elsewhere(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_LITTLE_ROOM", 2**63)

    def make(folder: Path) -> None:
        if cache.root in folder.parents:
            raise EngineError("the compiler failed")
        Maker()(folder)

    assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"


def test_a_cache_that_is_deleted_while_a_compiler_runs_is_left(
    cache: DiskCache, warnings: pytest.LogCaptureFixture
) -> None:
    def make(folder: Path) -> None:
        if cache.root in folder.parents:
            shutil.rmtree(cache.root)
        (folder / "model.bin").write_bytes(b"hello")

    assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"
    assert "was deleted" in warnings.text


def test_a_cache_that_is_deleted_right_after_something_was_written_is_left(cache: DiskCache) -> None:
    def make(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"hello")
        if cache.root in folder.parents:
            shutil.rmtree(cache.root)

    assert (cache.get_or_make("ab", make, {}) / "model.bin").read_bytes() == b"hello"


def test_no_room_anywhere_is_an_error_that_says_so(cache: DiskCache) -> None:
    def make(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unusable, match=r"neither the cache nor a temporary folder .*No space left"):
        cache.get_or_make("ab", make, {})


def test_what_need_not_be_kept_is_no_error_where_it_cannot_be(
    cache: DiskCache, warnings: pytest.LogCaptureFixture
) -> None:
    def make(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.keep("ab", make, {})
    assert cache.get("ab") is None
    assert "No space left" in warnings.text
    cache.keep("ab", Maker(), {})
    assert cache.get("ab") is not None


def test_links_are_not_kept(cache: DiskCache, tmp_path: Path) -> None:
    (tmp_path / "real").write_text("real")
    folder = cache.get_or_make("ab", lambda folder: (folder / "link").symlink_to(tmp_path / "real"), {})
    assert (folder / "link").read_text() == "real"
    assert cache.get("ab") is None


# Where it is


def test_options_say_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(tmp_path / "variable"))
    chosen = default_cache(Options.of({"cache_dir": str(tmp_path / "option"), "cache_bytes": 5}))
    assert chosen is not None
    assert (chosen.root, chosen.limit) == (tmp_path / "option", 5)
    chosen = default_cache(Options.of())
    assert chosen is not None
    assert chosen.root == tmp_path / "variable"
    assert default_cache(Options.of({"cache_dir": ""})) is None
    assert default_cache(Options.of({"cache_bytes": 0})) is None


def test_by_default_it_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SARDONYX_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = default_cache(Options.of())
    assert chosen is not None
    assert chosen.root.name == "sardonyx"
    assert not chosen.root.exists()
