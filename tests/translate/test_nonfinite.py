"""NaN and infinities reach the results that eager computes from them, and no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sardonyx

from .agreement import gradients, onnx

BROKEN = (float("nan"), float("inf"), float("-inf"))


def spoiled(x: Tensor, *places: int) -> Tensor:
    """A copy with NaN, infinity and negative infinity at some places."""
    copy = x.clone()
    for place, value in zip(places, BROKEN, strict=False):
        copy.view(-1)[place] = value
    return copy


def spreads_as_in_eager(function: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> None:
    """Assert eager's numbers where those are finite, and nothing finite elsewhere."""
    _compare(tree_leaves(onnx(function, dynamic=dynamic)(*args)), tree_leaves(function(*args)))


def gradients_spread_as_in_eager(functions: Sequence[Callable[[Tensor], Tensor]], x: Tensor, *places: int) -> None:
    """Assert it for the gradients of functions, each of its own operand, where some come as NaN and infinities."""

    def each(*operands: Tensor) -> list[Tensor]:
        return [function(operand) for function, operand in zip(functions, operands, strict=True)]

    _compare(*(_gradients(one, x, len(functions), places) for one in (onnx(each), each)))


def _gradients(function: Callable[..., list[Tensor]], x: Tensor, count: int, places: Sequence[int]) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [x.detach().clone().requires_grad_() for _ in range(count)]
        results = function(*leaves)
    above = [torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape) for y in results]
    return list(torch.autograd.grad(results, leaves, [spoiled(y, *places) for y in above]))


def _compare(results: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for index, (ours, eager) in enumerate(zip(results, expected, strict=True)):
        finite = eager.isfinite()
        assert (ours.dtype, ours.shape) == (eager.dtype, eager.shape)
        assert torch.equal(ours.isfinite(), finite), f"result {index}"
        tolerance = 1e-2 if ours.dtype in (torch.float16, torch.bfloat16) else 1e-5
        torch.testing.assert_close(ours[finite], eager[finite], rtol=tolerance, atol=tolerance)


def adaptive(x: Tensor) -> list[Tensor]:
    planes = [F.adaptive_avg_pool2d(x, size) for size in ((5, 7), (4, 3), (1, 5), (9, 11), (8, 2))]
    return [F.adaptive_avg_pool1d(x[0], 5), *planes, F.adaptive_avg_pool3d(x[None], (2, 5, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adaptive_averages_of_windows_that_hold_none(dtype: torch.dtype) -> None:
    spreads_as_in_eager(adaptive, spoiled(torch.randn(2, 3, 8, 9, dtype=dtype), 0, 150, 300))


def test_adaptive_averages_of_symbolic_sizes() -> None:
    x = spoiled(torch.randn(1, 2, 13, 9), 3, 150, 170)
    spreads_as_in_eager(lambda x: F.adaptive_avg_pool2d(x, (5, 4)), x, dynamic=True)


def test_gradients_of_adaptive_averages() -> None:
    sizes = ((5, 7), (4, 3), (1, 5), (9, 11))
    planes = [partial(F.adaptive_avg_pool2d, output_size=size) for size in sizes]
    volume = partial(F.adaptive_avg_pool3d, output_size=(2, 5, 3))
    gradients_spread_as_in_eager([*planes, volume], torch.randn(2, 3, 8, 9), 0, 9, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_diagonals_beside_them(dtype: torch.dtype) -> None:
    def diagonals(x: Tensor) -> list[Tensor]:
        views = [x.diagonal(offset, first, second) for offset, (first, second) in product((-2, 0, 1), ((0, 1), (2, 0)))]
        return [*views, x[0].diag(), x.diagonal(7), x[:, :, 0].trace()]

    x = torch.randn(3, 4, 5) * 9
    spreads_as_in_eager(diagonals, (spoiled(x, 0, 7, 33) if dtype.is_floating_point else x).to(dtype))


def test_diagonals_of_symbolic_sizes() -> None:
    x = spoiled(torch.randn(4, 6), 0, 7, 9)
    spreads_as_in_eager(lambda x: (x.diagonal(), x.diagonal(-1), x.diagonal(2, 1, 0)), x, dynamic=True)


def test_antialiased_images() -> None:
    def resized(x: Tensor) -> list[Tensor]:
        ways = product(("bilinear", "bicubic"), ((3, 4), (20, 9), (2, 25)))
        return [F.interpolate(x, size=size, mode=mode, antialias=True) for mode, size in ways]

    spreads_as_in_eager(resized, spoiled(torch.randn(1, 2, 11, 13), 0, 60, 200))


class Resized(nn.Module):
    """Images and volumes of which some axes keep their sizes."""

    def forward(self, x: Tensor, volume: Tensor) -> list[Tensor]:
        planes = [F.interpolate(x, size=size, mode="bilinear") for size in ((3, 4), (7, 8), (14, 8), (7, 20))]
        volumes = [F.interpolate(volume, size=size, mode="trilinear") for size in ((3, 4, 5), (6, 7, 8), (5, 14, 16))]
        return [
            *planes,
            *volumes,
            F.interpolate(x[0], size=8, mode="linear"),
            F.interpolate(x[0], size=11, mode="linear"),
        ]


def test_linear_images_in_an_exported_program() -> None:
    args = (spoiled(torch.randn(1, 2, 7, 8), 57, 3, 100), spoiled(torch.randn(1, 2, 5, 7, 8), 57, 3, 400))
    _compare(sardonyx.export(Resized().eval(), args)(*args), Resized()(*args))


def test_gradients_of_antialiased_images() -> None:
    ways = product(("bilinear", "bicubic"), ((3, 4), (20, 9)))
    functions = [partial(F.interpolate, size=size, mode=mode, antialias=True) for mode, size in ways]
    gradients_spread_as_in_eager(functions, torch.randn(1, 2, 11, 13), 0, 13, 23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.logsumexp])
def test_softmax_of_rows_with_them(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    nan, inf = BROKEN[:2]
    rows = [[inf, -inf, 1], [nan, -inf, 1], [-inf, -inf, -inf], [inf, inf, 0], [-inf, 1, 2], [0, -0.0, inf], [1, 2, 3]]
    x = torch.tensor(rows, dtype=dtype)
    torch.testing.assert_close(onnx(lambda x: function(x, 1))(x), function(x, 1), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_maxima_of_windows_with_nan_or_of_negative_infinity(dtype: torch.dtype, dynamic: bool) -> None:
    """And the lowest number is no infinity."""

    def pools(x: Tensor) -> tuple[Tensor, ...]:
        return (
            F.max_pool1d(x[0], 2),
            F.max_pool2d(x, 2, padding=1),
            F.max_pool3d(x, 2),
            F.adaptive_max_pool2d(x, 3),
            F.max_pool1d(x[0].relu(), 3, 2, padding=1),
            F.max_pool2d(x.relu(), 2, padding=1),
            F.max_pool2d(x.abs(), 2, dilation=2, ceil_mode=True),
            F.max_pool3d(x.abs(), 2),
            *F.max_pool2d(x.relu(), 3, 2, padding=1, return_indices=True),
            *F.max_pool1d(x[0], 2, return_indices=True),
            *F.max_pool2d(x, 3, 2, padding=1, return_indices=True),
            *F.max_pool2d(x[0], 2, dilation=2, ceil_mode=True, return_indices=True),
            *F.max_pool3d(x, 2, return_indices=True),
        )

    x = torch.randn(1, 3, 6, 6, dtype=dtype)
    x[0, 0, :4], x[0, 2] = float("-inf"), torch.finfo(dtype).min
    x[0, 2, 3, :4] = float("-inf")
    x[0, 1, :2, :2], x[0, 0, 1, 1], x[0, 1, 3, 5] = torch.finfo(dtype).min, float("nan"), float("nan")
    for got, want in zip(onnx(pools, dynamic=dynamic)(x), pools(x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("native", [False, True])
def test_gradients_of_maxima_go_to_the_last_nan_or_the_first_negative_infinity(native: bool, dynamic: bool) -> None:
    def pool(x: Tensor) -> Tensor:
        return torch.cat([F.max_pool2d(x.log2(), 2, padding=1), F.max_pool2d(x.log2().relu(), 2, padding=1)])

    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    x[0, 0, :3] = 0.0
    torch._dynamo.reset()
    options = {"native": native, "fallback": "error"}
    compiled = torch.compile(pool, backend="sardonyx", dynamic=dynamic, options=options)
    torch.testing.assert_close(gradients(compiled, x), gradients(pool, x), equal_nan=True)


@pytest.mark.parametrize("size", [(), (2, 3, 7, 8)], ids=["static", "dynamic"])
def test_indices_of_such_windows_in_an_exported_file(size: tuple[int, ...]) -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return F.max_pool2d(x, 3, 2, padding=1, return_indices=True)

    def made(*sizes: int) -> Tensor:
        x = torch.randn(*sizes)
        x[0], x[1, 0, 1, 2:4] = float("-inf"), float("nan")
        return x

    dims = (dict.fromkeys(range(4), torch.export.Dim.AUTO),) if size else None
    program = sardonyx.export(Pool(), (made(2, 2, 5, 6),), dynamic_shapes=dims)
    x = made(*(size or (2, 2, 5, 6)))
    for got, want in zip(program(x), Pool()(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_attention_of_rows_without_them() -> None:
    def attention(*args: Tensor) -> list[Tensor]:
        q, k, v = args
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        options: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": mask}]
        return [F.scaled_dot_product_attention(q, k, v, **given) for given in options]

    whole = [torch.randn(2, 5, 8) for _ in range(3)]
    for spoil in range(3):
        spreads_as_in_eager(attention, *(spoiled(x, 19, 45) if i == spoil else x for i, x in enumerate(whole)))


def test_a_row_of_nan_and_negative_infinity_is_not_an_empty_one() -> None:
    x = torch.full((4, 3), float("-inf"))
    x[1, 0] = x[2, 2] = float("nan")
    x[3, 1] = 2.0
    spreads_as_in_eager(lambda x: torch.ops.aten._safe_softmax(x, -1), x)


def test_distances_of_points_without_them() -> None:
    def distances(x: Tensor, y: Tensor) -> list[Tensor]:
        norms = (0.0, 0.5, 1.0, 2.0, 3.0)  # with infinity, torch passes over NaN or does not, by its place
        return [torch.cdist(x, y, p) for p in norms] + [F.pdist(x, p) for p in norms]

    spreads_as_in_eager(distances, spoiled(torch.randn(5, 3), 1, 7, 9), torch.randn(4, 3))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "loss", [F.smooth_l1_loss, partial(F.smooth_l1_loss, beta=0.5), F.huber_loss, F.l1_loss, F.mse_loss]
)
def test_gradients_of_losses_with_them(loss: Callable[..., Tensor], dtype: torch.dtype, reduction: str) -> None:
    edges = torch.tensor([*BROKEN, 0.0, -0.5, 0.5, 1.0, -1.0, 3.0], dtype=dtype)
    x, target = edges.repeat(len(edges)), edges.repeat_interleave(len(edges))
    loss = partial(loss, reduction=reduction)

    def slopes(function: Callable[..., Tensor]) -> Sequence[Tensor]:
        with torch.enable_grad():
            leaves = [value.clone().requires_grad_() for value in (x, target)]
            return torch.autograd.grad(function(*leaves).sum(), leaves)

    _compare(slopes(onnx(loss)), slopes(loss))
