"""The files that several commands are tried on, exported once, by the program itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from .calling import BERT, RESNET, run

_WAVES = """
import torch

class Wave(torch.nn.Module):
    def forward(self, x):
        return (x - 0.5).sqrt() if self.fails else x.sin() * 2

    fails = False

class Fails(Wave):
    fails = True

def wave():
    return Wave().eval(), (torch.linspace(0, 3, 7),)

def fails():
    return Fails().eval(), (torch.linspace(0, 3, 7),)
"""


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="needs the package transformers")
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def bert(files: Path) -> Path:
    """With a size that may change."""
    words = ("--dynamic", "input_ids.0=batch", "--dynamic", "attention_mask.0=batch", "-o", files / "bert.onnx")
    done = run("export", BERT, *words)
    assert done.exit_code == 0, done.output
    return files / "bert.onnx"


@pytest.fixture(scope="session")
def resnet(files: Path) -> Path:
    done = run("export", RESNET, "-o", files / "resnet50.onnx")
    assert done.exit_code == 0, done.output
    return files / "resnet50.onnx"


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A file that is no model."""
    path = tmp_path / "broken.onnx"
    path.write_bytes(b"no model")
    return path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command writes without being told where must not stay."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def waves(tmp_path: Path) -> Path:
    """A file of two modules: one is right, the other makes a NaN."""
    path = tmp_path / "waves.py"
    path.write_text(_WAVES)
    return path
