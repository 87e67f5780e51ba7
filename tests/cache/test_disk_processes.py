"""Processes and threads that share the disk cache: one makes, the others wait for it; one that is killed harms none."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from sardonyx.cache import disk
from sardonyx.cache.disk import DiskCache

from .making import Maker, kept
from .processes import Arrivals, children, exit_codes


def test_waiting_for_another_process_is_said(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    said, told = list[str](), threading.Event()
    monkeypatch.setattr(disk, "_WARN_AFTER", 0.0)
    monkeypatch.setattr(disk.log, "warning", lambda text, *args: said.append(text % args) or told.set())
    kept(cache, "ab")
    with cache._lock("cd"):
        waiting = threading.Thread(target=kept, args=(cache, "cd"))
        waiting.start()
        assert told.wait(600)
    waiting.join()
    assert "waiting for another process" in said[0]
    assert "cd.lock" in said[0]
    assert cache.get("cd") is not None


def test_of_eight_processes_one_makes_and_all_get_it(cache: DiskCache, tmp_path: Path) -> None:
    marks, arrivals = tmp_path / "marks", Arrivals(8)

    def make(folder: Path) -> None:
        with marks.open("a") as file:
            file.write("made\n")
        arrivals.wait()
        Maker()(folder)

    def work(index: int) -> None:
        arrivals.arrive()
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


def test_a_process_killed_while_making_leaves_a_cache_that_works(cache: DiskCache) -> None:
    read, write = os.pipe()

    def make(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        os.write(write, b".")
        signal.pause()

    (child,) = children(1, lambda _: cache.get_or_make("ab", make, {}) and None)
    os.close(write)
    assert os.read(read, 1) == b"."
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
