"""Where commands write: a place that cannot be is told before the work begins, and nothing is half-written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sardonyx.cli import _feeds
from sardonyx.cli._output import atomic_folder
from sardonyx.errors import SardonyxError

from .calling import run

FILES = {
    "run": ["-o", "{}.npz"],
    "optimize": ["-o", "{}.onnx"],
    "report": ["-o", "{}.html"],
    "profile": ["--trace", "{}.json"],
}
FOLDERS = {"compile": ["--native", "-o", "{}"], "reduce": ["-o", "{}"], "native compile": ["-o", "{}"]}


def words(command: str, place: str) -> list[str]:
    return [word.format(place) for word in {**FILES, **FOLDERS}[command]]


@pytest.mark.parametrize("command", FILES)
def test_a_folder_that_is_not_there_is_told_first(broken: Path, command: str) -> None:
    done = run(command, broken, *words(command, "nowhere/name"))
    assert (done.exit_code, done.stderr) == (3, "error: there is no folder nowhere\n  next: mkdir -p nowhere\n")


@pytest.mark.parametrize("command", FILES)
def test_a_folder_is_no_file(broken: Path, command: str) -> None:
    given = words(command, "taken")
    Path(given[-1]).mkdir()
    done = run(command, broken, *given)
    assert done.exit_code == 3
    assert f"{given[-1]} is a folder, but a file is written\n  next: name a file in it" in done.stderr


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize("place", ["taken", "taken/inside"])
def test_a_file_is_no_folder(broken: Path, command: str, place: str) -> None:
    Path("taken").touch()
    done = run(*command.split(), broken, *words(command, place))
    assert done.exit_code == 3
    assert "taken is a file, but a folder is written" in done.stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may not write everywhere")
def test_a_folder_that_may_not_be_written_to_is_told_first(broken: Path) -> None:
    Path("locked").mkdir(mode=0o555)
    done = run("run", broken, "-o", "locked/out.npz")
    assert (done.exit_code, "locked/out.npz cannot be written" in done.stderr) == (3, True)


def test_an_export_asks_for_its_place_first() -> None:
    done = run("export", "torch.nn:ReLU", "-o", "nowhere/relu.onnx")
    assert (done.exit_code, "mkdir -p nowhere" in done.stderr) == (3, True)


def test_outputs_that_cannot_be_written_leave_the_file_as_it_was(tmp_path: Path) -> None:
    _feeds.write_arrays(tmp_path / "x.npz", {"x": torch.ones(2)})
    before = (tmp_path / "x.npz").read_bytes()
    with pytest.raises(SardonyxError):
        _feeds.write_arrays(tmp_path / "x.npz", {"x": torch.ones(2).bfloat16()})
    assert (tmp_path / "x.npz").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(content: str) -> None:
        with atomic_folder(tmp_path / "new") as folder:
            (folder / "half").touch()
            (folder / "file").write_text(content, encoding="ascii")

    with pytest.raises(UnicodeEncodeError):
        write("×")
    assert not list(tmp_path.iterdir())
    write("all")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new" / "file").read_text() == "all"
