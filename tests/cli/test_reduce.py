"""`sardonyx reduce`: a failing file cut down, and written as a folder to send."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tests.diagnose.models import GELU, X, approximated, out_of_bounds

from .calling import run, told


def test_a_model_that_raises_becomes_a_folder(tmp_path: Path) -> None:
    onnx.save(out_of_bounds(30), str(tmp_path / "model.onnx"))
    done = run("reduce", tmp_path / "model.onnx", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "32 nodes → 1: Gather" in done.stdout
    assert (tmp_path / "out" / "reproduce.py").exists()


def test_a_wrong_result_is_told_as_json(tmp_path: Path) -> None:
    onnx.save(approximated(20), str(tmp_path / "model.onnx"))
    np.savez(tmp_path / "x.npz", x=X)
    words = ("--inputs", tmp_path / "x.npz", "--way", GELU, "--tolerance", "1e-5", "-o", tmp_path / "out")
    found = told("reduce", tmp_path / "model.onnx", *words)
    assert found["kind"] == "wrong"
    assert found["operators"] == ["Div", "Erf", "Add", "Mul", "Mul"]


def test_a_model_that_does_not_fail_exits_with_three(tmp_path: Path) -> None:
    onnx.save(approximated(5), str(tmp_path / "model.onnx"))
    done = run("reduce", tmp_path / "model.onnx", "-o", tmp_path / "out")
    assert done.exit_code == 3
    assert "does not crash, raise or give wrong results" in done.output
    assert not (tmp_path / "out").exists()


class Eigen(nn.Module):
    """An operator that ONNX does not have, among others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(x.sin() @ x.T).exp()


def test_a_file_of_torch_export_is_cut_against_torch(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(Eigen().eval(), (torch.randn(4, 4),)), tmp_path / "model.pt2")
    done = run("reduce", tmp_path / "model.pt2", "-o", tmp_path / "out", "--against", "torch")
    assert done.exit_code == 0, done.output
    assert "→ 1: aten._linalg_eigh.default" in done.stdout
    assert (tmp_path / "out" / "values.pt").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--way", "nobody"], 3, "unknown engine 'nobody'"),
        (["--way", "onnx-mlir"], 4, "the engine 'onnx-mlir' is not available"),
        (["--against", "onnx-mlir"], 4, "the engine 'onnx-mlir' is not available"),
        (["--command", "python check.py"], 2, "does not contain {model}"),
        (["--minutes", "0"], 2, "is not in the range"),
    ],
)
def test_what_is_no_fault_of_the_model_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    onnx.save(out_of_bounds(3), str(tmp_path / "model.onnx"))
    done = run("reduce", tmp_path / "model.onnx", "-o", tmp_path / "out", *words)
    assert (done.exit_code, said in done.stderr) == (code, True), done.output
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_left_alone_and_an_earlier_result_is_replaced(tmp_path: Path) -> None:
    onnx.save(out_of_bounds(3), str(tmp_path / "model.onnx"))
    before = (tmp_path / "model.onnx").read_bytes()
    done = run("reduce", tmp_path / "model.onnx", "-o", tmp_path)
    assert (done.exit_code, "has files that this command did not write" in done.stderr) == (3, True)
    assert (tmp_path / "model.onnx").read_bytes() == before
    for _ in range(2):
        assert run("reduce", tmp_path / "model.onnx", "-o", tmp_path / "out").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "out"]
