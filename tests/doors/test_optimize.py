"""`sardonyx.optimize`: an ONNX model that exists already, wherever its weights are."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import SardonyxError


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.GELU()).eval()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with its weights beside it, in a folder that is not the working directory."""
    folder = tmp_path / "model"
    folder.mkdir()
    sardonyx.export(layers(), (torch.ones(3, 64),)).save(folder / "model.onnx", external_data=True)
    assert (folder / "model.onnx.data").exists()
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("relative", [True, False])
def test_weights_in_a_file_of_their_own_are_found_from_anywhere(
    elsewhere: Path, relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("model/model.onnx") if relative else elsewhere / "model.onnx"
    program = sardonyx.optimize(path)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    x = torch.randn(3, 64)
    torch.testing.assert_close(program(x), layers()(x), rtol=1e-5, atol=1e-5)


def test_a_model_in_memory_whose_weights_are_in_a_file_runs_too(elsewhere: Path) -> None:
    given = ir.load(elsewhere / "model.onnx")
    program = sardonyx.optimize(given)
    assert program(torch.ones(3, 64)).shape == (3, 32)
    assert any(isinstance(x.const_value, ir.ExternalTensor) for x in given.graph.initializers.values())


def test_narrow_weights_in_a_file_run_too(tmp_path: Path) -> None:
    module = nn.Linear(64, 32).eval().bfloat16()
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    path = sardonyx.export(module, (x,)).save(tmp_path / "model.onnx", external_data=True)
    torch.testing.assert_close(sardonyx.optimize(path)(x), module(x), rtol=1e-2, atol=1e-2)


def test_a_file_of_weights_that_is_missing_is_named(elsewhere: Path) -> None:
    (elsewhere / "model.onnx.data").unlink()
    with pytest.raises(SardonyxError, match=r"model\.onnx\.data, which does not exist"):
        sardonyx.optimize(elsewhere / "model.onnx")
