"""Further devices are other providers of ONNX Runtime's, or other settings of one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sardonyx import eager
from sardonyx.eager.dispatch import State
from sardonyx.errors import OptionError

native = pytest.mark.skipif("State.core is None", reason="the executor in Python has one device that torch knows")


@pytest.fixture(autouse=True)
def second() -> None:
    eager.set_device(1, "CPUExecutionProvider", {})


def test_calls_stay_on_their_device() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    one, two = x.to("ort:0"), x.to("ort:1")
    for function in (torch.relu, lambda a: a * 2 + 1, lambda a: a @ a.t(), lambda a: a.sum(), lambda a: a[0].add_(1)):
        for moved in (one, two):
            result = function(moved.clone())
            assert result.device == moved.device
            torch.testing.assert_close(result.cpu(), function(x.clone()))
    assert two.to("ort:0").device == one.device
    assert torch.rand(2, device="ort:1").device.index == 1
    assert torch.zeros(2, device="ort:1").device.index == 1
    assert torch.empty(2, device="ort:1").resize_(9).untyped_storage().device.index == 1


def test_what_there_is() -> None:
    assert torch.ort.device_count() == 2
    assert torch.ort.get_device_name(1) == "ONNX Runtime, CPUExecutionProvider"
    with pytest.raises(RuntimeError, match="no device ort:5"):
        torch.ones(2, device="ort:5")
    with pytest.raises(ValueError, match="device index is 7; use 0 to 2"):
        eager.set_device(7)
    with pytest.raises(OptionError, match="no provider 'NoneExecutionProvider'"):
        eager.set_device(1, "NoneExecutionProvider")


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match=r"aten.add.Tensor: tensors are on ort:0 and ort:1"):
        torch.ones(2, device="ort:1") + torch.ones(2, device="ort:0")


@native
def test_the_current_one_and_gradients() -> None:
    with torch.ort.device(1):
        x = torch.ones(2, 3, device="ort")
        assert torch.ort.current_device() == 1
    assert x.device.index == 1
    assert torch.ort.current_device() == 0
    layer = nn.Linear(3, 2).to("ort:1")
    with torch.enable_grad():
        layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device.index == 1
    assert State.core is not None
