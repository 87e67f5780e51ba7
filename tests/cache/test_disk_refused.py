"""What the disk cache does not trust or cannot write: it says so once, and works without."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from sardonyx.cache import disk
from sardonyx.cache.disk import DiskCache, UnusableCache, default_cache
from sardonyx.cache.manifest import MANIFEST
from sardonyx.errors import EngineError
from sardonyx.options import Options

from .making import Maker, kept


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    cache = DiskCache(root, 2**30)
    with pytest.raises(UnusableCache, match=f"chmod go-w {root}"):
        cache.check()
    assert cache.get("ab") is None
    assert (kept(cache, "ab") / "model.bin").read_bytes() == b"hello"
    assert default_cache(Options(cache_dir=str(root))) is None
    assert list(root.iterdir()) == []
    assert len(warnings.messages) == 1


def test_a_folder_of_another_user_is_not_used(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(cache, "ab")
    monkeypatch.setattr(os, "getuid", lambda: cache.root.stat().st_uid + 1)
    with pytest.raises(UnusableCache, match="belongs to another user"):
        cache.check()
    assert cache.get("ab") is None


def opened(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).chmod(0o777)


@pytest.mark.parametrize("path", ["entries", "making", "locks"])
def test_a_folder_within_that_others_can_write_to_is_not_used(cache: DiskCache, path: str) -> None:
    kept(cache, "ab")
    opened(cache.root, path)
    with pytest.raises(UnusableCache, match=f"other users can write to {cache.root / path}"):
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

    with pytest.raises(UnusableCache, match=r"neither the cache nor a temporary folder .*No space left"):
        cache.get_or_make("ab", make, {})


def test_what_need_not_be_kept_is_no_error_where_it_cannot_be(
    cache: DiskCache, warnings: pytest.LogCaptureFixture
) -> None:
    def make(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.put("ab", make, {})
    assert cache.get("ab") is None
    assert "No space left" in warnings.text
    cache.put("ab", Maker(), {})
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
