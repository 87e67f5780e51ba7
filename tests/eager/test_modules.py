"""Modules that move to the device and back, and those that never do: `enable()` changes nothing for the latter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sardonyx.errors import SardonyxError


def test_modules_on_the_cpu_load_states_as_without_the_device() -> None:
    assert not torch.__future__.get_swap_module_params_on_conversion()
    layer, other = nn.GRU(2, 3), nn.GRU(2, 3)
    view = layer.weight_hh_l0[0]
    layer.load_state_dict(other.state_dict())
    layer.to(torch.float64)
    assert torch.equal(layer.weight_hh_l0, other.weight_hh_l0.double())
    assert torch.equal(view, other.weight_hh_l0[0])


def test_a_layer_that_holds_weak_references_moves_and_loads_a_state() -> None:
    layer, other, x = nn.GRU(2, 3), nn.GRU(2, 3), torch.randn(4, 1, 2)
    layer.to("ort").load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(x.to("ort"))[0].cpu(), other(x)[0])


def test_a_weight_with_a_live_view_moves_and_the_view_stays_as_it_was() -> None:
    layer = nn.Linear(3, 4)
    weight, view, before = layer.weight, layer.weight[0], layer.weight[0].tolist()
    layer.to("ort")
    assert layer.weight is weight
    assert (weight.device.type, view.device.type) == ("ort", "cpu")
    assert view.tolist() == before


@torch.enable_grad()
def test_gradients_tied_weights_and_optimizers_go_along() -> None:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layer[1].weight = layer[0].weight
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    layer.to("ort")
    assert layer[0].weight is layer[1].weight
    assert layer[0].weight.grad is not None
    assert layer[0].weight.grad.device.type == "ort"
    before = layer[0].weight.tolist()
    layer(torch.ones(2, 3, device="ort")).sum().backward()
    optimizer.step()
    assert layer[0].weight.tolist() != before
    trained = layer[0].weight.tolist()
    assert layer.cpu()[1].weight.tolist() == trained
    assert layer[0].weight is layer[1].weight


def test_a_lazy_layer_moves_before_its_sizes_are_known() -> None:
    layer = nn.LazyLinear(3).to("ort")
    assert layer(torch.ones(2, 5, device="ort")).shape == (2, 3)
    assert layer.weight.device.type == "ort"


def test_a_module_without_memory_gets_it_on_the_device() -> None:
    layer = nn.Linear(2, 2, device="meta").to_empty(device="ort")
    assert layer.weight.device.type == "ort"


def test_the_default_backend_of_torch_compile_says_which_to_take() -> None:
    model = torch.compile(nn.Linear(3, 4).to("ort"))
    with pytest.raises(RuntimeError, match=r"backend=\"sardonyx\"") as caught:
        model(torch.ones(2, 3, device="ort"))
    assert isinstance(getattr(caught.value, "inner_exception", None), SardonyxError)
