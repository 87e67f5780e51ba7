"""The next process need not trace a module again, and is never given another module's model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx


def model() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).eval()


class Windowed(nn.Module):
    def forward(self, x: torch.Tensor, position: int) -> torch.Tensor:
        return x + position


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def kept(folder: Path) -> Path:
    (found,) = (path.parent for path in folder.rglob("call_spec.json"))
    return found


def test_a_module_like_one_before_is_not_traced_again(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    first, second = (sardonyx.compile(model(), cache_dir=str(tmp_path)) for _ in range(2))
    expected = first(x)
    same(second(x), expected)
    assert [b.from_disk for b in (*first.builds, *second.builds)] == [False, True]
    assert "from disk" in str(second.report)
    same(second(x), expected)


def test_the_model_that_auto_chose_is_kept_by_the_first_process(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    options = {
        "engine": "auto",
        "engine_options": {"engines": ["onnxruntime", "reference"]},
        "cache_dir": str(tmp_path),
    }
    first, second = (sardonyx.compile(model(), **options) for _ in range(2))
    expected = model()(x)
    same(first(x), expected)
    assert (kept(tmp_path) / "model.onnx").stat().st_size
    for _ in range(2):
        same(second(x), expected)
    assert [b.from_disk for b in (*first.builds, *second.builds)] == [False, True]


def test_weights_are_those_of_the_module_at_hand(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    sardonyx.compile(model(), cache_dir=str(tmp_path))(x)
    other = model()
    other[0].weight.mul_(2)
    compiled = sardonyx.compile(other, cache_dir=str(tmp_path))
    for _ in range(6):  # the first from disk, and later from where edits cost less
        same(compiled(x), other(x))
        other[2].bias.add_(1)
    assert [build.from_disk for build in compiled.builds] == [True, False]


def test_sizes_that_became_dynamic_are_kept_too(tmp_path: Path) -> None:
    for from_disk in (False, True):
        compiled = sardonyx.compile(model(), cache_dir=str(tmp_path))
        for rows in (3, 5, 7):
            same(compiled(torch.ones(rows, 4)), model()(torch.ones(rows, 4)))
        assert [(b.dynamic, b.from_disk) for b in compiled.builds] == [(False, from_disk), (True, from_disk)]


def test_an_integer_that_became_an_input_is_one_in_the_kept_model(tmp_path: Path) -> None:
    for from_disk in (False, True):
        compiled = sardonyx.compile(Windowed().eval(), cache_dir=str(tmp_path))
        for position in range(3, 9):
            assert compiled(torch.ones(2), position).tolist() == [position + 1.0] * 2
        assert [build.from_disk for build in compiled.builds] == [from_disk] * 2


def test_a_kept_model_that_computes_something_else_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sardonyx.doors import module_store

    monkeypatch.setattr(module_store, "fingerprint", lambda module: "the same for all")
    x = torch.randn(3, 4)
    sardonyx.compile(model(), cache_dir=str(tmp_path))(x)
    other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    compiled = sardonyx.compile(other, cache_dir=str(tmp_path))
    for _ in range(3):
        same(compiled(x), other(x))
    assert [build.from_disk for build in compiled.builds] == [True, False]
    assert "differ from the module's" in caplog.text
    third = sardonyx.compile(other, cache_dir=str(tmp_path))
    for _ in range(3):
        same(third(x), other(x))
    assert [build.from_disk for build in third.builds] == [True]


@pytest.mark.parametrize(
    "edit",
    [
        lambda calling: calling.update(condition="__import__('os').abort()"),
        lambda calling: calling.update(inputs=["nowhere"]),
        lambda calling: calling.pop("reshaped"),
        lambda calling: calling.update(results=[{"output": 7, "order": None}]),
    ],
)
def test_what_a_kept_model_says_of_itself_is_not_trusted(
    tmp_path: Path, edit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sardonyx.cache import disk

    x = torch.randn(3, 4)
    sardonyx.compile(model(), cache_dir=str(tmp_path))(x)
    file = kept(tmp_path) / "call_spec.json"
    calling = json.loads(file.read_text())
    edit(calling)
    file.write_text(json.dumps(calling))
    monkeypatch.setattr(disk, "verify", lambda *_: None)  # or it would be dropped before it is read
    compiled = sardonyx.compile(model(), cache_dir=str(tmp_path))
    for _ in range(2):
        same(compiled(x), model()(x))
    assert not compiled.builds[-1].from_disk
    assert "is dropped" in caplog.text


def test_nothing_is_kept_where_none_is_wanted_or_it_could_not_be_told_apart(tmp_path: Path) -> None:
    class Lambda(nn.Module):
        def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
            result: torch.Tensor = how(x)
            return result

    compiled = sardonyx.compile(Lambda().eval(), cache_dir=str(tmp_path))
    assert compiled(torch.ones(2), torch.neg).tolist() == [-1, -1]
    assert compiled(torch.ones(2), torch.exp).tolist() == pytest.approx([2.71828, 2.71828])
    sardonyx.compile(model(), cache_dir="")(torch.ones(3, 4))
    assert not list(tmp_path.rglob("call_spec.json"))


PROGRAM = """
import sys, torch, sardonyx

for forward in sys.argv[2:]:
    names = {"torch": torch, "__name__": "__main__"}
    exec(f"class Model(torch.nn.Module):\\n def forward(self, x):\\n  return {forward}", names)
    compiled = sardonyx.compile(names["Model"]().eval(), cache_dir=sys.argv[1])
    with torch.no_grad():
        print(compiled(torch.arange(6.0).view(2, 3)).tolist(), compiled.builds[0].from_disk)
"""


def test_another_process_is_given_the_model_of_the_same_code_only(tmp_path: Path) -> None:
    def told_by_a_process(*forwards: str) -> list[str]:
        environment = {**os.environ, "PYTHONHASHSEED": str(len(forwards)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), *forwards]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert told_by_a_process("x.sum(0) * 2") == ["[6.0, 10.0, 14.0] False"]
    assert told_by_a_process("x.sum(0) * 2", "x.sum(0) * 3", "x.sum(1) * 3") == [
        "[6.0, 10.0, 14.0] True",
        "[9.0, 15.0, 21.0] False",
        "[9.0, 36.0] False",
    ]
