"""onnx-mlir's package for torch. Its compiler on PATH is the stand-in that the engine's own tests use.

Building the package, and containers inside containers, are commands for a shell that need its sources or a daemon:
`tests/engines/onnx_mlir/test_container.py` has the second.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import sardonyx.compat as onnxmlirtorch
from tests.engines.onnx_mlir.conftest import standin  # noqa: F401

my_option = {
    "compile_options": "-O3",
}


class AddModel(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.fixture
def installed(standin: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("PATH", f"{Path(standin).parent}:{os.environ['PATH']}")


mod, X, Y = AddModel(), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])


@pytest.mark.usefixtures("installed")
def test_with_torch_compile() -> None:
    opt_mod = torch.compile(mod, backend=onnxmlirtorch.onnxmlir_backend, options=my_option)
    assert opt_mod(X, Y).equal(mod(X, Y))


@pytest.mark.usefixtures("installed")
def test_as_a_model_wrapper() -> None:
    opt_mod = onnxmlirtorch.compile(mod, **my_option)
    assert opt_mod(X, Y).equal(mod(X, Y))


@pytest.mark.usefixtures("installed")
def test_as_a_model_wrapper_in_another_way_whose_cache_holds_three() -> None:
    opt_mod: Any = onnxmlirtorch.ONNXMLIRTorch(mod, **my_option)
    for size in (1, 2, 3, 4, 4):
        inputs = torch.rand(size), torch.rand(size)
        results = opt_mod(*inputs)
        assert results.equal(mod(*inputs))
    assert opt_mod.cache_info().maxsize == 3


def test_interception_with_torch_compile(capsys: pytest.CaptureFixture[str]) -> None:
    """The document leaves out the backend, without which the option is given to torch's own."""
    myoption = {
        "onnxmlir-intercept": True,
    }
    opt_model = torch.compile(mod, backend=onnxmlirtorch.onnxmlir_backend, options=myoption)
    assert opt_model(X, Y).equal(mod(X, Y))
    assert "x: float32[2] cpu" in capsys.readouterr().out


def test_interception_of_forward_directly(capsys: pytest.CaptureFixture[str]) -> None:
    model = AddModel()
    onnxmlirtorch.interceptForward(model)
    assert model(X, Y).equal(X + Y)
    assert "y: float32[2] cpu" in capsys.readouterr().out
