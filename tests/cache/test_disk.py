"""The disk cache: one makes, all get it; what is damaged is made anew; what cannot be kept works all the same."""

from __future__ import annotations

import json
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sardonyx.cache import disk, manifest
from sardonyx.cache.disk import DiskCache
from sardonyx.cache.manifest import MANIFEST
from sardonyx.errors import EngineError

from .making import Maker, kept, used_long_ago

Damage = Callable[[Path], object]


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
    assert first.used == pytest.approx(first.made, abs=3600)


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
    with pytest.raises(ValueError, match="not a key"):
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
    assert "deleted the damaged entry" in warnings.messages[0]
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
    monkeypatch.setattr(manifest, "_STABLE_AFTER", -1.0)
    folder, hashed = kept(cache, "ab"), []
    digest = manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path: hashed.append(path.name) or digest(path))
    cache.get("ab"), cache.get("ab")
    assert sorted(hashed) == ["model.bin", "note.txt"]
    flip_a_byte(folder)
    os.utime(folder / "model.bin", (0, 0))  # the clock of the file system may not have ticked since
    assert cache.get("ab") is None


def test_an_edit_right_after_a_check_is_noticed(cache: DiskCache) -> None:
    for _ in range(20):
        folder = kept(cache, "ab")
        assert cache.get("ab") is not None
        flip_a_byte(folder)
        assert cache.get("ab") is None


def test_an_entry_that_was_no_use_is_made_anew_once(cache: DiskCache) -> None:
    kept(cache, "ab", b"useless")
    os.utime(cache.root / "entries" / "ab", (0, 0))  # as above
    generation = cache.generation("ab")
    for make in (Maker(b"better"), Maker(b"never made")):
        folder = cache.get_or_make("ab", make, {}, stale=generation)
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


def test_what_was_just_handed_out_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_JUST_USED", 10**6)  # however long the machine takes for the next lines
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
