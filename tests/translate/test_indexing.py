"""Indexing, gathering, scattering, searching."""

from __future__ import annotations

import pytest
import torch

from .agreement import agrees, agrees_at, onnx

ROWS = torch.tensor([2, 0, -1])
COLUMNS = torch.tensor([[1], [3]])


@pytest.mark.parametrize(
    "index",
    [
        (ROWS,),
        (slice(None), ROWS),
        (ROWS, ROWS),
        (slice(None), ROWS, ROWS),
        (ROWS, slice(None), ROWS),
        (COLUMNS, ROWS),
        (slice(1, 3), ROWS),
        (..., ROWS),
        (None, ROWS),
    ],
    ids=["first", "second", "pairs", "inner pairs", "apart", "broadcast", "after a slice", "last", "new axis"],
)
def test_advanced_indexing(index: tuple[object, ...]) -> None:
    agrees(lambda x: (x * 2)[index], torch.randn(4, 4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.bool])
def test_filling_by_index(dtype: torch.dtype) -> None:
    def filled(x: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
        ways = ((-1, ROWS, 1), (0, ROWS[0], 0), (1, ROWS[:0], 1), (1, ROWS, value))
        scalars = [x[0, 0, 0].index_fill(0, ROWS[1:rows], 1) for rows in (1, 2)]
        return [*(x.index_fill(*way) for way in ways), *scalars]

    agrees(filled, torch.randn(4, 3, 5).to(dtype), torch.ones((), dtype=dtype))


def test_filling_by_index_keeps_the_strides_that_a_clone_has() -> None:
    def filled(x: torch.Tensor) -> list[torch.Tensor]:
        ways = (x.mT, x.mT.expand(2, *x.mT.shape), x[:, ::2], x[:, :, :1].expand(-1, -1, 3))
        filled = [view.index_fill(0, ROWS[1:], 1) for view in ways]
        return [*filled, torch.diag_embed(filled[0])]

    x = torch.randn(4, 3, 5)[:3]
    assert [y.stride() for y in onnx(filled)(x)] == [y.stride() for y in filled(x)]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("indices", [[ROWS], [None, ROWS], [ROWS, ROWS], [ROWS, None, ROWS]])
def test_assigning_by_index(indices: list[torch.Tensor | None], accumulate: bool) -> None:
    x = torch.randn(4, 4, 4)
    values = torch.randn(torch.ops.aten.index(x, indices).shape)
    agrees(lambda x, v: torch.ops.aten.index_put(x, indices, v, accumulate), x, values)


def test_one_value_is_assigned_under_a_mask() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[x > 0] = 7.0
        return y

    agrees(function, torch.randn(4, 5))


def test_values_are_assigned_under_a_mask_in_order() -> None:
    x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
    values = torch.randn(int(mask.sum()))
    agrees(lambda x, m, v: torch.ops.aten.index_put(x, [m], v), x, mask, values)
    agrees(torch.masked_scatter, x, mask, torch.randn(20))


@pytest.mark.parametrize("start", [None, 0, 1, -3, 9, -9])
@pytest.mark.parametrize("end", [None, 2, -1, 99])
@pytest.mark.parametrize("step", [1, 3])
def test_slices_end_where_pythons_do(start: int | None, end: int | None, step: int) -> None:
    agrees(lambda x: (x * 2)[:, start:end:step], torch.randn(2, 7))


def test_slices_are_assigned() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x.clone()
        z[1:3] = y
        z[:, ::2] = 1
        z[-1, 0] = 5
        return z

    agrees(function, torch.randn(4, 5), torch.randn(5))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathering_along_any_dimension(dim: int) -> None:
    index = torch.tensor([[0, 1, 2], [2, 0, 0]])
    agrees(lambda x: (x.gather(dim, index), torch.index_select(x, dim, index[1])), torch.randn(3, 4))


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_scattering_combines_as_asked(reduce: str, include_self: bool, dtype: torch.dtype) -> None:
    x, source = torch.randint(1, 9, (3, 4)).to(dtype), torch.randint(1, 9, (3, 5)).to(dtype)
    index = torch.tensor([[0, 1, 1, 3, 0], [2, 2, 2, 0, 1], [3, 3, 0, 0, 0]])
    agrees(lambda x, s: x.scatter_reduce(1, index, s, reduce, include_self=include_self), x, source)


def test_scattering_takes_the_leading_part_of_a_larger_source() -> None:
    index = torch.tensor([[0, 1], [2, 0]])
    agrees(lambda x, s: x.scatter(0, index, s), torch.zeros(3, 2), torch.randn(4, 5))


def test_flat_positions_are_taken_and_put() -> None:
    index = torch.tensor([[0, 5], [-1, 3]])
    agrees(lambda x: (x.take(index), x.put(index, x[:2, :2] * 9)), torch.randn(3, 4))


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 3])
def test_diagonals_are_read_and_written(offset: int) -> None:
    x = torch.randn(2, 4, 5)
    source = torch.randn(x.diagonal(offset, 1, 2).shape)
    agrees(lambda x, s: ((x + 1).diagonal(offset, 1, 2), x.diagonal_scatter(s, offset, 1, 2)), x, source)


def test_a_diagonal_has_nothing_of_the_numbers_beside_it() -> None:
    x = torch.randn(3, 4, 2)
    x[0, 1], x[2, 0], x[1, 1, 1] = torch.inf, torch.nan, -torch.inf
    agrees(lambda x: (x.diagonal(), x.diagonal(1, 0, -1), x.diagonal(-1, 2, 1), x.diagonal(4), x[..., 0].trace()), x)
    agrees(lambda x: (x.half().diagonal(), (x > 0).diagonal(), x[2:, 1:].long().diagonal()), x)


def test_membership_is_told_whatever_the_number_of_elements() -> None:
    def members(x: torch.Tensor, tests: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found, others = torch.isin(x, tests), torch.isin(x, tests, invert=True)
        return found, others, torch.isin(tests, x[:1], assume_unique=True), torch.isin(x, tests[:0])

    tests = torch.tensor([[2, 0], [3, 7]])
    first = torch.tensor([[1, 2.5, 2], [torch.nan, 0, 3]])
    agrees_at(members, (first, tests), (torch.arange(60.0).view(20, 3), tests), (torch.arange(9.0).view(3, 3), tests))


@pytest.mark.parametrize("right", [False, True])
def test_values_find_their_place_among_boundaries(right: bool) -> None:
    boundaries = torch.tensor([-1.0, 0.0, 0.0, 2.0])
    values = torch.tensor([[-3.0, -1.0, 0.0], [1.0, 2.0, torch.nan]])
    agrees(lambda v, b: (torch.bucketize(v, b, right=right), torch.searchsorted(b, v, right=right)), values, boundaries)


def test_positions_of_what_is_not_zero() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        agrees(torch.nonzero, torch.tensor([[0, 3, 0], [1, 0, 2]]))


def test_equal_elements_keep_their_order_when_sorted_stably() -> None:
    agrees(lambda x: torch.sort(x, stable=True, descending=True), torch.tensor([1, 3, 1, 3, 2, 1]))


def test_the_largest_are_sorted() -> None:
    agrees(lambda x: (x.topk(3), x.topk(2, 0, largest=False), x.argsort()), torch.randperm(12).view(3, 4).float())


@pytest.mark.parametrize("run", [torch.cumsum, torch.cumprod, torch.cummax, torch.cummin, torch.logcumsumexp])
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_running_results(run: object, length: int) -> None:
    agrees(lambda x: run(x, 1), torch.randn(2, length))  # type: ignore[operator]


def test_a_running_extreme_stands_at_the_last_of_equals() -> None:
    agrees(lambda x: (x.cummax(0), x.cummin(0)), torch.tensor([1.0, 3.0, 3.0, 2.0, 1.0, torch.nan, 5.0]))
