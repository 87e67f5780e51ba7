"""Branches and loops: torch.cond, while_loop, scan and map as If, Loop and Scan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch.testing._internal.hop_db import hop_db

from sardonyx.telemetry.report import collecting

from .agreement import agrees, agrees_at, onnx
from .control_flow import accumulate, agree_both_ways, branches, counting, loops_in_loops, nested, times

# Branches


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_branch_is_taken_by_the_data(dtype: torch.dtype) -> None:
    agree_both_ways(branches, torch.rand(3, 4).to(dtype))


def test_a_branch_of_any_size() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    agrees_at(branches, (x,), (-x,), (y,), (-y,))


def test_branches_within_branches() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    agrees_at(nested, *((sign * v,) for v in (x, y) for sign in (-1, 0.1, 9)))


def test_branches_of_integers_and_booleans() -> None:
    agree_both_ways(lambda x: torch.cond(x.sum() > 3, lambda x: x // 2, lambda x: x * x, (x,)), torch.arange(5))
    for x in (torch.tensor([True, False]), torch.tensor([False, False])):
        agrees(lambda x: torch.cond(x.any(), lambda x: ~x, lambda x: x.logical_or(x[:1]), (x,)), x)


def test_branches_of_tensors_without_dimensions_and_without_elements() -> None:
    agree_both_ways(lambda x: torch.cond(x > 3, lambda x: x // 2, lambda x: x * x, (x,)), torch.tensor(7))
    agree_both_ways(lambda x: torch.cond(x.sum() > 0, lambda x: x[:0] * 1, lambda x: x[3:] + 1, (x,)), torch.rand(3, 4))


def test_branches_see_strided_operands_and_return_strided_results() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.transpose(0, 1) + 1, lambda x: x.transpose(0, 1) * 2, (x,))

    agree_both_ways(function, torch.rand(4, 3).t())
    assert onnx(function)(torch.rand(4, 3).t()).stride() == function(torch.rand(4, 3).t()).stride()


def test_branches_of_different_sizes() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    agrees_at(
        lambda x: torch.cond(x.sum() > 0, lambda x: x[:2].sin(), lambda x: x.cos(), (x,)) * 2,
        *((sign * v,) for v in (x, y) for sign in (-1, 1)),
    )


def test_branches_with_chunks_and_slices_of_one_operand() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.chunk(3)[0] + 1, lambda x: x[:1] * 2, (x,))

    def sliced_first(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x[:1].exp() + x.chunk(3)[0].sin(), lambda x: x[:1] * 2, (x,))

    agree_both_ways(function, torch.rand(3, 4))
    agree_both_ways(sliced_first, torch.rand(3, 4))


def test_a_branch_that_returns_a_constant() -> None:
    held = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    agree_both_ways(lambda x: torch.cond(x.sum() > 0, lambda x: held * 1, lambda x: x + held, (x,)), torch.rand(3, 4))


def test_a_branch_by_a_size() -> None:
    agrees_at(
        lambda x: torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x * 2, (x,)),
        *((torch.rand(n, 3),) for n in (3, 4, 5, 6)),
    )


@pytest.mark.parametrize("value", [0, 4])
def test_a_branch_by_a_number_read_from_a_tensor(value: int) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        agrees(
            lambda x, n: torch.cond(n.item() > 2, lambda x: x + 1, lambda x: x * 2, (x,)),
            torch.rand(3),
            torch.tensor(value),
        )


# Loops


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rounds", [0, 1, 7])
def test_a_loop_runs_as_often_as_its_condition_says(rounds: int, dtype: torch.dtype) -> None:
    agrees(times, torch.rand(3, 4).to(dtype), torch.tensor(rounds))


def test_a_loop_of_any_size() -> None:
    agrees_at(times, *((torch.rand(rows, 4), torch.tensor(n)) for rows in (3, 5) for n in (0, 1, 7)))


def test_loops_and_branches_within_loops() -> None:
    agrees_at(loops_in_loops, *((torch.rand(rows, 4), torch.tensor(n)) for rows in (3, 5) for n in (0, 1, 5)))


def test_a_loop_that_starts_with_its_condition_false_returns_what_it_was_given() -> None:
    x = torch.rand(3)
    torch.testing.assert_close(onnx(times)(x, torch.tensor(-1)), (torch.tensor(0), x), rtol=0, atol=0)


def test_a_loop_counts_in_an_integer() -> None:
    with collecting() as report:
        compiled = onnx(counting, dynamic=True)
        for x in (torch.rand(3, 4), torch.rand(6, 2)):
            rounds, result = compiled(x)
            assert rounds == len(x)
            assert type(rounds) is int
            torch.testing.assert_close(result, counting(x)[1])
    assert report.operators["Loop"] == 1


def test_what_follows_a_loop_uses_the_integer_it_counted() -> None:
    def function(x: Tensor) -> Tensor:
        rounds, x = counting(x)
        return x * (rounds + 2)

    agrees_at(function, (torch.rand(3, 4),), (torch.rand(6, 2),))


def test_sizes_inside_a_loop_follow_its_integer() -> None:
    def function(x: Tensor, limit: Tensor) -> Any:
        def goes_on(i: int, x: Tensor) -> Tensor:
            return torch.arange(i).sum() < limit

        return while_loop(goes_on, lambda i, x: (i + 1, x + torch.arange(i + 1).cumsum(0).sum()), (0, x))[1]

    agrees_at(function, *((torch.rand(rows), torch.tensor(n)) for rows in (3, 5) for n in (0, 1, 9)))


# Scans and maps


def test_a_scan_returns_what_it_carries_and_what_it_stacks() -> None:
    agrees(accumulate, torch.rand(1, 4))
    agrees_at(accumulate, (torch.rand(3, 4),), (torch.rand(6, 2),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_a_scan_in_other_dtypes(dtype: torch.dtype) -> None:
    agrees(lambda x: scan(lambda c, x: (c + x, c * x), x[0] * 0, x, dim=0), (torch.rand(3, 4) * 4).to(dtype))


def test_a_scan_backwards_along_another_dimension_of_several_tensors() -> None:
    def combine(carried: Any, xs: Any) -> Any:
        total, product = carried
        x, y = xs["x"], xs["y"]
        return (total + x, product * y.mean()), (total * x, product + x.sum(), y)

    def function(x: Tensor) -> Any:
        start = (x.new_zeros(3), x.new_ones(()))
        return scan(lambda c, xs: _cloned(combine(c, xs)), start, {"x": x, "y": x.exp()}, dim=1, reverse=True)

    agrees(function, torch.rand(3, 5))


def _cloned(results: Any) -> Any:
    carried, (first, second, third) = results
    return carried, (first, second, third.clone())


def test_a_map_over_the_first_dimension() -> None:
    agrees_at(
        lambda x, y: map_over(lambda x, y: x.sin() + y, x, y),
        (torch.rand(3, 4), torch.rand(4)),
        (torch.rand(6, 2), torch.rand(2)),
    )


def test_an_associative_scan() -> None:
    agrees(
        lambda x: associative_scan(lambda a, b: a * b + a + b, x, dim=0, combine_mode="generic"),
        torch.rand(7, 3),
    )


def test_a_region_compiled_once_and_called_twice() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        return x.sin() * x.cos().sum(0)

    agrees_at(lambda x: region(x) + region(x * 2), (torch.rand(3, 4),), (torch.rand(6, 2),))


_SAMPLED = [
    (op, dtype)
    for op in hop_db
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool)
    if op.name in ("cond", "invoke_subgraph", "map")
    or (op.name in ("while_loop", "while_loop_stack_output") and dtype.is_floating_point)
    or (op.name == "scan" and dtype != torch.bool)  # a product of booleans, which ONNX has not
]


@pytest.mark.parametrize(
    ("op", "dtype"), _SAMPLED, ids=[f"{op.name}-{op.variant_test_name}-{dtype}" for op, dtype in _SAMPLED]
)
def test_torchs_own_samples(op: Any, dtype: torch.dtype) -> None:
    for sample in op.sample_inputs("cpu", dtype):
        agrees(op.op, sample.input, *sample.args, exact=True)
