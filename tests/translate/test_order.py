"""Medians, modes, sets, repetitions; segments and bags."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from .agreement import agrees, agrees_at, onnx

NUMBERS = torch.tensor(
    [[3.0, -1.0, 2.0, 2.0, 9.0, 2.0], [0.5, 0.5, -0.5, 7.0, 1.0, 8.0], [1.0, 0.0, 1.0, 0.0, 4.0, 4.0]]
)
WITH_NAN = torch.tensor([[math.nan, 1.0, 2.0, 5.0], [4.0, 3.0, 9.0, 7.0], [math.nan] * 4, [1.0, 2.0, math.nan, 0.0]])


@pytest.fixture(autouse=True)
def data_dependent_shapes() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


@pytest.mark.parametrize("x", [NUMBERS, NUMBERS.half(), NUMBERS.long(), NUMBERS.T, WITH_NAN, torch.tensor([[4.0]])])
def test_medians_are_the_lower_of_the_two_in_the_middle(x: torch.Tensor) -> None:
    agrees(lambda x: (x.median(), x.nanmedian(), x.median(0)[0], x.median(-1, True)[0], x.nanmedian(1)[0]), x)


@pytest.mark.parametrize("x", [NUMBERS, WITH_NAN])
def test_the_places_of_order_statistics_hold_them(x: torch.Tensor) -> None:
    agrees(lambda x: [x.gather(1, f(x, 1, keepdim=True)[1]) for f in (torch.median, torch.nanmedian)], x)
    agrees(lambda x: x.gather(1, x.kthvalue(2, 1, True)[1]), x)
    agrees(lambda x: x.gather(1, x.mode(1, True)[1]), NUMBERS)


def test_the_median_of_nothing_is_nan_and_of_a_scalar_itself() -> None:
    agrees(lambda x: (x.median(), x.nanmedian()), torch.empty(0, 3))
    agrees(lambda x: (x.median(), x.median(0), x.kthvalue(1), x.mode(0), x.nanmedian(0)), torch.tensor(3.0))


def test_the_largest_number_is_below_infinity() -> None:
    agrees(lambda x: (x.kthvalue(1)[0], x.median()), torch.tensor([math.inf, torch.finfo(torch.float32).max, math.inf]))


@pytest.mark.parametrize("x", [NUMBERS, NUMBERS.half(), NUMBERS.long()])
def test_the_mode_is_the_smallest_of_the_most_frequent(x: torch.Tensor) -> None:
    agrees(lambda x: (x.mode(0)[0], x.mode(1, True)[0], x.flatten().mode()[0]), x)


def test_order_statistics_of_any_size() -> None:
    calls = ((torch.randn(3, 4),), (torch.randn(6, 9),))
    agrees_at(lambda x: (x.median(0), x.nanmedian(1)[0], x.mode(1)[0], x.median()), *calls)


@pytest.mark.parametrize("x", [NUMBERS, NUMBERS.half(), NUMBERS.long(), NUMBERS > 1, NUMBERS.int()])
def test_unique_elements_where_they_stand_and_how_often(x: torch.Tensor) -> None:
    agrees(lambda x: torch.unique(x, return_inverse=True, return_counts=True), x)
    agrees(lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True), x)


def test_every_nan_is_unique() -> None:
    agrees(lambda x: torch.unique(x, return_counts=True), WITH_NAN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_unique_slices(dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0], [0, 1], [0, 1], [1, 0], [1, 1]]).to(dtype)
    agrees(lambda x: torch.unique(x, return_inverse=True, return_counts=True, dim=0), x)
    agrees(lambda x: torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=0), x)


def test_along_a_dimension_torch_tells_where_and_how_often_unasked() -> None:
    x = torch.tensor([[1, 2], [1, 2], [0, 5]])
    agrees(lambda x: torch.ops.aten.unique_dim(x, 0), x)
    agrees(lambda x: torch.ops.aten.unique_consecutive(x, dim=0), x)


def test_places_of_what_is_not_zero_up_to_a_number() -> None:
    agrees(lambda x: [torch.nonzero_static(x, size=size, fill_value=7) for size in (2, 40)], NUMBERS > 1)


def test_elements_are_repeated_as_often_as_asked() -> None:
    repeats = torch.tensor([0, 2, 3])
    agrees(lambda x, r: (x.repeat_interleave(r, 0), torch.repeat_interleave(r)), NUMBERS, repeats)
    agrees(lambda x, r: x.repeat_interleave(r, 0), NUMBERS, torch.zeros_like(repeats))
    other = torch.randn(2, 6), torch.tensor([1, 4])
    agrees_at(lambda x, r: x.repeat_interleave(r, 0), (NUMBERS, repeats), other)


def test_booleans_are_sorted() -> None:
    agrees(lambda x: (torch.sort(x, dim=0, stable=True), torch.argsort(x, dim=1, stable=True)), NUMBERS > 1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    places, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 3, 3, 4])
    weight = torch.randn(10, 4)
    agrees(lambda w: F.embedding_bag(places, w, offsets, mode=mode, padding_idx=padding), weight)
    agrees(lambda w: F.embedding_bag(places.reshape(2, 4), w, mode=mode, padding_idx=padding), weight)
    ends = torch.tensor([0, 3, 8])
    agrees(lambda w: F.embedding_bag(places, w, ends, mode=mode, include_last_offset=True), weight)


def test_a_bag_keeps_to_itself_what_is_infinite() -> None:
    weight = torch.randn(10, 4)
    weight[4] = math.inf
    agrees(lambda w: F.embedding_bag(torch.tensor([4, 5, 6]), w, torch.tensor([0, 1]), mode="sum"), weight)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("initial", [None, 2])
def test_segments_are_reduced(reduce: str, initial: int | None) -> None:
    data = torch.randn(8, 3)
    data[2, 1] = math.nan
    lengths, offsets = torch.tensor([3, 0, 4, 1]), torch.tensor([0, 3, 3, 7, 8])
    agrees(lambda d: torch.segment_reduce(d, reduce, lengths=lengths, initial=initial), data)
    agrees(lambda d: torch.segment_reduce(d, reduce, offsets=offsets, initial=initial), data.half())
    rows = torch.tensor([[3, 0], [1, 2]])
    agrees(lambda d: torch.segment_reduce(d, reduce, lengths=rows, axis=1, initial=initial), torch.randn(2, 3, 4))


def test_what_has_no_median_stays_in_torch() -> None:
    with pytest.raises(Exception, match="the median of an empty integer tensor"):
        onnx(lambda x: x.median())(torch.empty(0, dtype=torch.int64))


@pytest.mark.parametrize("weight", [None, torch.arange(9.0)])
@pytest.mark.parametrize("density", [False, True])
def test_histograms_between_given_edges(weight: torch.Tensor | None, density: bool) -> None:
    x, edges = torch.tensor([0.0, 1.0, 2.0, 2.5, 3.0, -1.0, 9.0, 0.3, 0.7]), torch.tensor([0.0, 1.0, 2.0, 2.75, 3.0])
    agrees(lambda x, e: torch.histogram(x, e, weight=weight, density=density), x, edges, exact=True)
    agrees(lambda x: torch.histogram(x, 10, range=(0.0, 3.0), weight=weight, density=density), x, exact=True)


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_booleans_are_combined_while_scattering(reduce: str, include_self: bool) -> None:
    x, index = NUMBERS > 1, torch.tensor([[0, 1, 2, 2, 0, 1], [1, 1, 0, 0, 2, 2]])
    agrees(lambda x, s: x.scatter_reduce(0, index, s, reduce, include_self=include_self), x, NUMBERS[:2] > 0.5)


def test_running_extremes_of_booleans() -> None:
    agrees(lambda x: (x.cummax(1), x.cummin(0)), NUMBERS > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_running_sums_of_exponentials_keep_what_is_far_below_the_largest(dtype: torch.dtype) -> None:
    x = torch.tensor([[-200.0, 0.0, -300.0, 5.0, 5.0], [-math.inf, -math.inf, 1.0, math.inf, 2.0]], dtype=dtype)
    x = torch.cat([x, torch.tensor([[1.0, math.nan, 2.0, 0.0, -math.inf]], dtype=dtype)])
    for dim in (0, 1):
        torch.testing.assert_close(
            onnx(lambda x, dim=dim: torch.logcumsumexp(x.clone(), dim))(x), x.logcumsumexp(dim), equal_nan=True
        )
