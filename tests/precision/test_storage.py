"""Weights whose storage activations decided."""

from __future__ import annotations

import torch

from sardonyx.native.linear import pack_int4
from sardonyx.precision.calibration import calibrated
from sardonyx.precision.packing import MatrixPacker, Packing
from sardonyx.precision.rounding import nearest_int4
from sardonyx.precision.storage import Nearest, Rounded, Smoothed, contents_of, stored
from sardonyx.precision.weights import WeightForm


def rounded() -> tuple[torch.Tensor, Rounded]:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 40, generator=generator), torch.randn(200, 64, generator=generator)
    x = x @ (torch.randn(64, 64, generator=generator) * torch.logspace(0, -2, 64)[:, None])
    storage = calibrated("int4", weight, x, contents_of(weight), 64)
    assert isinstance(storage, Rounded)
    return weight, storage


def packed(weight: torch.Tensor, storage: Rounded) -> torch.Tensor:
    return Packing([0], MatrixPacker("int4", WeightForm(), storage), {"weight": "w"}).pack([weight])["w"]


def test_a_weight_keeps_its_rounding_until_it_is_edited() -> None:
    weight, storage = rounded()
    assert packed(weight, storage) is storage.packed.constants["weight"]
    weight[0] += 1.0
    nearest = pack_int4(nearest_int4(weight, 64, symmetric=True)).constants["weight"]
    assert torch.equal(packed(weight, storage), nearest)


def test_weights_far_from_zero_have_zero_points() -> None:
    weight = torch.rand(64, 40, generator=torch.Generator().manual_seed(0)) + 1.0
    storage = calibrated("int4", weight, torch.ones(1, 64), "", 64)
    assert isinstance(storage, Rounded)
    assert storage.packed.has_zero_points
    assert not rounded()[1].packed.has_zero_points


def test_float_precisions_have_nothing_to_decide() -> None:
    assert calibrated("bf16", torch.ones(64, 4), torch.ones(100, 64), "", 64) is None


def test_what_is_stored_can_be_read_back() -> None:
    weight, storage = rounded()
    again = stored(storage.kind, storage.settings, storage.constants)
    assert torch.equal(again.pack(weight, storage.contents).constants["weight"], storage.packed.constants["weight"])
    assert again.settings == storage.settings
    smoothed = Smoothed(torch.arange(1.0, 65.0))
    read = stored(smoothed.kind, smoothed.settings, smoothed.constants)
    assert torch.equal(read.pack(weight).constants["scales"], smoothed.pack(weight).constants["scales"])
    assert stored(Nearest.kind, Nearest(32).settings, {}) == Nearest(32)
