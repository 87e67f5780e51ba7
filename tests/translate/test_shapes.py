"""Sizes at the edge: none, one, zero, broadcast, not contiguous."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .agreement import agrees, onnx


@pytest.mark.parametrize("function", [torch.neg, torch.sum, torch.softmax, torch.cumsum, torch.argmax, torch.std])
def test_a_tensor_without_dimensions_is_one_number(function: object) -> None:
    takes_dim = function in (torch.softmax, torch.cumsum)
    agrees(lambda x: function(x, 0) if takes_dim else function(x + 1), torch.tensor(2.5))  # type: ignore[operator]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4)])
def test_sums_of_nothing_are_zero_and_products_one(shape: tuple[int, ...]) -> None:
    agrees(lambda x: (x.sum(), x.prod(), x.sum(0), x.prod(-1)), torch.randn(shape))


def test_the_mean_of_nothing_is_not_a_number() -> None:
    agrees(lambda x: (x.mean(), x.mean(0), x.var(0)), torch.randn(0, 3))


def test_any_of_nothing_is_false_and_all_is_true() -> None:
    agrees(lambda x: ((x > 0).any(0), (x > 0).all(0)), torch.randn(0, 3))


def test_a_product_over_an_inner_size_of_zero_is_zero() -> None:
    agrees(lambda x, y: x @ y, torch.randn(3, 0), torch.randn(0, 4))


def test_addmm_over_an_inner_size_of_zero_keeps_the_scaled_bias() -> None:
    bias, x, y = torch.randn(4), torch.randn(3, 0), torch.randn(0, 4)
    agrees(lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2), bias, x, y)


def test_addmm_with_beta_zero_ignores_a_bias_that_is_not_a_number() -> None:
    nan = torch.full((4,), torch.nan)
    agrees(lambda b, x, y: torch.addmm(b, x, y, beta=0), nan, torch.randn(3, 2), torch.randn(2, 4))


def test_empty_parts_are_skipped_when_joining() -> None:
    agrees(lambda x, y: torch.cat([x, y, x]), torch.randn(0), torch.randn(2, 3))


def test_an_empty_tensor_can_be_reshaped() -> None:
    agrees(lambda x: (x * 2).reshape(4, 0, 2), torch.randn(0, 3))


def test_an_empty_batch_passes_a_layer() -> None:
    agrees(torch.nn.Linear(4, 3).double(), torch.randn(0, 4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("left", "right"), [((3, 1), (1, 4)), ((1,), (2, 3)), ((), (2, 3)), ((2, 1, 3), (4, 1)), ((0, 1), (1, 3))]
)
def test_operands_broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    agrees(lambda x, y: (x + y, torch.where(x > y, x, y), torch.maximum(x, y)), torch.randn(left), torch.randn(right))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:],
        lambda x: x.expand(3, *x.shape),
        lambda x: x.as_strided((3, 3), (1, 2)),
    ],
    ids=["transposed", "strided", "offset", "expanded", "overlapping"],
)
def test_inputs_need_not_be_contiguous(view: object) -> None:
    agrees(lambda x: (x * 2, x.sum(-1), x.flatten()), view(torch.randn(4, 6)))  # type: ignore[operator]


def test_a_result_has_the_strides_eager_gives_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).transpose(0, 1)

    x = torch.randn(3, 5)
    assert onnx(function)(x).stride() == function(x).stride()


def test_an_expanded_result_is_still_one_row_of_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).expand(4, 5)

    x = torch.randn(5)
    result = onnx(function)(x)
    assert result.stride() == (0, 1)
    torch.testing.assert_close(result, function(x))


def test_overlapping_windows_keep_their_values() -> None:
    agrees(lambda x: (x * 2).unfold(0, 3, 1), torch.randn(7))


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_dimensions_count_from_either_end(dim: int) -> None:
    agrees(lambda x: (x.sum(dim), x.softmax(dim), x.cumsum(dim), x.flip(dim), x.unbind(dim)), torch.randn(3, 4))


def test_dimensions_of_size_one_are_squeezed_and_others_stay() -> None:
    agrees(lambda x: ((x + 1).squeeze(), (x + 1).squeeze(1), (x + 1).squeeze(0)), torch.randn(2, 1, 3))


def test_a_flattened_roll_crosses_rows() -> None:
    agrees(lambda x: (torch.roll(x + 1, 2), torch.roll(x, (1, -1), (0, 1))), torch.randn(3, 4))


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_negative_padding_crops(mode: str) -> None:
    agrees(lambda x: F.pad(x, (-1, 2, 1, -2), mode=mode), torch.randn(1, 2, 6, 6))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_adaptive_windows_may_differ_in_size(size: int) -> None:
    agrees(lambda x: (F.adaptive_avg_pool2d(x, size), F.adaptive_max_pool2d(x, size)), torch.randn(2, 3, 7, 5))


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("divisor", [None, 3])
def test_average_windows_over_the_edge_divide_as_torch_does(count_include_pad: bool, divisor: int | None) -> None:
    agrees(lambda x: F.avg_pool2d(x, 3, 2, 1, True, count_include_pad, divisor), torch.randn(1, 2, 8, 7))


def test_the_place_of_a_largest_is_counted_within_its_plane() -> None:
    agrees(lambda x: F.max_pool2d(x, 2, return_indices=True), torch.randn(2, 3, 4, 6))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("scale", [0.6, 1.5, 2.0])
def test_images_are_resized_by_a_scale(mode: str, scale: float) -> None:
    agrees(lambda x: F.interpolate(x, scale_factor=scale, mode=mode), torch.randn(1, 2, 10, 8), exact=True)


def test_images_shrink_with_antialiasing() -> None:
    agrees(lambda x: F.interpolate(x, (4, 3), mode="bilinear", antialias=True), torch.randn(1, 2, 9, 8))


def test_convolutions_take_images_without_a_batch() -> None:
    weight = torch.randn(4, 3, 3, 3)
    agrees(lambda x, w: F.conv2d(x, w, padding=1, stride=2), torch.randn(3, 8, 8), weight)
