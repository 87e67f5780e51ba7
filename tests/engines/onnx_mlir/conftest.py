"""The compilers that the tests drive: the stand-in, and a real onnx-mlir where the environment names one."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def script(path: Path, program: str) -> Path:
    """A command that runs one of the stand-ins in this Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / program}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of the stand-in compiler."""
    if shutil.which("cc") is None:
        pytest.skip("the stand-in for onnx-mlir needs a C compiler called cc")
    return str(script(tmp_path_factory.mktemp("bin") / "onnx-mlir", "standin.py"))


@pytest.fixture(scope="session", params=["stand-in", "onnx-mlir"])
def compiler(request: pytest.FixtureRequest) -> str:
    """Each compiler in turn: what is tested with this fixture holds for the real one too."""
    if request.param == "stand-in":
        return str(request.getfixturevalue("standin"))
    found = os.environ.get("SARDONYX_TEST_ONNX_MLIR") or shutil.which("onnx-mlir")
    if not found:
        pytest.skip("no onnx-mlir on PATH or in the environment variable SARDONYX_TEST_ONNX_MLIR")
    return found
