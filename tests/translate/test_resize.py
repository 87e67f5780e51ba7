"""Resizing of images of bytes, which torch computes in fixed-point arithmetic."""

from __future__ import annotations

from itertools import product

import torch
from torch.nn import functional as F

import sardonyx
from sardonyx.telemetry.report import collecting

from .agreement import agrees


def image(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def every_mode(x: torch.Tensor) -> list[torch.Tensor]:
    ways = product(("bilinear", "bicubic"), (False, True), (False, True))
    modes = [{"mode": mode, "align_corners": align, "antialias": smooth} for mode, align, smooth in ways]
    found = [F.interpolate(x, size=(7, 20), **mode) for mode in modes]
    found += [F.interpolate(x, scale_factor=(1.7, 0.6), **mode) for mode in modes[::3]]
    return found + [F.interpolate(x, size=(20, 7), mode=mode) for mode in ("nearest", "nearest-exact")]


def test_bytes_are_rounded_as_torch_rounds_them() -> None:
    agrees(every_mode, image(2, 3, 11, 13), exact=True)


def test_bytes_of_many_channels_in_any_layout() -> None:
    x = image(1, 6, 40, 5).contiguous(memory_format=torch.channels_last)
    agrees(lambda x: [F.interpolate(x, size=(7, 5), mode="bicubic"), F.interpolate(x, size=(3, 9), mode="bilinear")], x)


def test_bytes_in_an_exported_program() -> None:
    class Smaller(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            modes = ({"mode": "bilinear"}, {"mode": "bicubic"}, {"mode": "bilinear", "antialias": True})
            return tuple(F.interpolate(x, size=(5, 30), **mode) for mode in modes)

    x, other = image(1, 3, 9, 12), image(1, 3, 9, 12)
    torch.testing.assert_close(sardonyx.export(Smaller().eval(), (x,))(other), Smaller()(other))


def test_bytes_of_symbolic_sizes_stay_in_torch() -> None:
    def half(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(x.shape[2] // 2, x.shape[3] // 2), mode="bicubic")

    with collecting() as report:
        compiled = torch.compile(half, backend="sardonyx", dynamic=True, options={"fallback": "quiet"})
        for x in (image(1, 3, 12, 14), image(1, 3, 20, 18)):
            torch.testing.assert_close(compiled(x), half(x))
    assert {fallback.operator for fallback in report.fallbacks} == {"aten.upsample_bicubic2d.default"}


def test_scales_that_leave_a_size_as_it_is() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            ways = product(("bilinear", "bicubic", "nearest"), (1.05, (1.05, 2.05), (1.7, 1.05)))
            return tuple(F.interpolate(x, scale_factor=scale, mode=mode) for mode, scale in ways)

    x = torch.randn(1, 2, 10, 10)
    program = sardonyx.export(Scaled().eval(), (x,))
    for ours, eager in zip(program(x), Scaled()(x), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
