"""`sardonyx cache`: what it lists, counts and drops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sardonyx.cache.disk import MANIFEST, DiskCache
from sardonyx.cli._program import program
from sardonyx.cli.cache import size_of


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    cache = DiskCache(tmp_path / "cache", 2**30)
    for days, key in enumerate(("0123abcd", "4567abcd"), start=1):
        folder = cache.get_or_make(
            key, lambda folder: (folder / "model").write_bytes(bytes(1500)), {"what": "artifact", "engine": "iree"}
        )
        os.utime(folder / MANIFEST, (days * 1e6, days * 1e6))
    return cache


def run(cache: DiskCache, *words: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(program, ["cache", "--dir", str(cache.root), *words], input=answer)


def told(cache: DiskCache, *words: str) -> object:
    done = run(cache, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_ls_shows_what_is_kept_the_last_used_first(cache: DiskCache) -> None:
    lines = run(cache, "ls").output.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["4567abcd", "artifact", "iree", "1.5", "kB"],
        ["0123abcd", "artifact", "iree", "1.5", "kB"],
    ]
    assert "days ago" in lines[1]


def test_ls_for_programs(cache: DiskCache) -> None:
    listed = told(cache, "ls")
    assert [(entry["key"], entry["bytes"], entry["used"]) for entry in listed] == [
        ("4567abcd", 1500, 2e6),
        ("0123abcd", 1500, 1e6),
    ]
    assert listed[0]["about"] == {"what": "artifact", "engine": "iree"}


def test_an_empty_cache_is_said_to_be_empty(tmp_path: Path) -> None:
    empty = DiskCache(tmp_path / "none", 1)
    assert run(empty, "ls").output == f"{empty.root} is empty\n"
    assert run(empty, "clear", "--yes").output == "0 bytes freed, 0 bytes left\n"


def test_size(cache: DiskCache) -> None:
    assert run(cache, "size").output == f"3.0 kB of 8.6 GB in 2 entries, in {cache.root}\n"
    assert told(cache, "size") == {"folder": str(cache.root), "entries": 2, "bytes": 3000, "limit": 8 * 2**30}


def test_prune_keeps_what_was_used_last(cache: DiskCache) -> None:
    assert told(cache, "prune", "--limit", "2kB") == {"freed": 1500, "bytes": 1500}
    assert [entry.key for entry in cache.entries()] == ["4567abcd"]


def test_prune_without_a_limit_keeps_what_the_options_allow(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(cache, "prune") == {"freed": 0, "bytes": 3000}
    monkeypatch.setenv("SARDONYX_CACHE_BYTES", "1600")
    assert told(cache, "prune") == {"freed": 1500, "bytes": 1500}


def test_clear_asks_first(cache: DiskCache) -> None:
    assert run(cache, "clear", answer="n\n").exit_code == 1
    assert cache.size() == 3000
    assert "3.0 kB freed, 0 bytes left" in run(cache, "clear", answer="y\n").output
    assert cache.size() == 0


def test_clear_need_not_ask(cache: DiskCache) -> None:
    assert told(cache, "clear", "--yes") == {"freed": 3000, "bytes": 0}


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("17", 17), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("500mb", 5 * 10**8), ("3k", 3000)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GB", "2XB", "1IB"])
def test_what_is_no_size_is_refused(cache: DiskCache, text: str) -> None:
    done = run(cache, "prune", "--limit", text)
    assert done.exit_code == 2
    assert "is not a size" in done.output
    assert cache.size() == 3000


def test_a_folder_that_others_can_write_to_is_an_error_with_the_next_step(cache: DiskCache) -> None:
    cache.root.chmod(0o777)
    done = run(cache, "ls")
    assert done.exit_code == 3
    assert f"next: chmod go-w {cache.root}" in done.output


def test_the_folder_comes_from_the_environment(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(cache.root))
    assert str(cache.root) in CliRunner().invoke(program, ["cache", "size"]).output


def test_help_lists_the_commands() -> None:
    assert "cache" in CliRunner().invoke(program, ["--help"]).output
    for word in ("ls", "size", "prune", "clear"):
        assert word in CliRunner().invoke(program, ["cache", "--help"]).output


def test_python_can_run_the_program(cache: DiskCache) -> None:
    words = ["cache", "--dir", str(cache.root), "size"]
    done = subprocess.run([sys.executable, "-m", "sardonyx", *words], capture_output=True, text=True)
    assert done.stdout.startswith("3.0 kB of")


@pytest.mark.parametrize("name", ["click", "rich"])
def test_without_its_packages_the_program_says_what_to_install(name: str) -> None:
    code = f"import sys; sys.modules['{name}'] = None; from sardonyx.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 4
    assert done.stderr == f'error: the command line needs the package {name}\n  next: pip install "sardonyx[cli]"\n'
