"""Dtypes, and what torch makes of them together."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.nn import functional as F

from sardonyx.errors import UnsupportedOperator

from .agreement import agrees, onnx

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(1, 9, shape).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_point_arithmetic(dtype: torch.dtype) -> None:
    agrees(lambda x, y: (x + y * 2 - 1) / (x.abs() + 1), some(dtype, 3, 4), some(dtype, 4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_sums_and_softmax(dtype: torch.dtype) -> None:
    agrees(lambda x, y: ((x @ y).softmax(-1), x.mean(0), x.amax(1)), some(dtype, 3, 4), some(dtype, 4, 5))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_arithmetic_stays_integer(dtype: torch.dtype) -> None:
    agrees(lambda x, y: (x + y, x * 2, x // y, x % y, torch.maximum(x, y)), some(dtype, 3, 4), some(dtype, 4))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_true_division_of_integers_gives_floating_point(dtype: torch.dtype) -> None:
    agrees(lambda x, y: (x / y, x.float().mean(), torch.sqrt(x)), some(dtype, 3, 4), some(dtype, 4))


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS])
def test_sums_of_integers_are_wide(dtype: torch.dtype) -> None:
    agrees(lambda x: (x.sum(), x.sum(0), x.prod(1), x.cumsum(0)), some(dtype, 3, 4))


@pytest.mark.parametrize("floor", [torch.floor_divide, operator.floordiv, torch.remainder, torch.fmod])
def test_division_of_negative_integers_rounds_as_torch_does(floor: object) -> None:
    x, y = torch.tensor([-7, 7, -7, 7, 6]), torch.tensor([2, -2, -2, 2, -3])
    agrees(lambda a, b: floor(a, b), x, y)  # type: ignore[operator]


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
def test_division_modes_of_floating_point(mode: str | None) -> None:
    x, y = torch.tensor([-7.5, 7.5, -7.0, 0.3, 1.0]), torch.tensor([2.0, -2.0, -0.5, 0.1, 0.0])
    agrees(lambda a, b: torch.div(a, b, rounding_mode=mode), x, y, exact=True)


def test_halves_round_to_even() -> None:
    agrees(torch.round, torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]))


@pytest.mark.parametrize("left", [torch.bool, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("right", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32])
def test_dtypes_meet_as_torchs_promotion_says(left: torch.dtype, right: torch.dtype) -> None:
    agrees(lambda x, y: (x + y, x * y, x == y, x > y, torch.where(x > 0, x, y)), some(left, 3), some(right, 2, 3))


def test_a_number_does_not_widen_a_tensor() -> None:
    agrees(lambda x: (x + 1.5, x * 2, x > 0.1), some(torch.float16, 4))


def test_a_fractional_number_makes_integers_floating_point() -> None:
    agrees(lambda x: (x + 1.5, x * 0.5, x > 2.5), some(torch.int64, 4))


def test_a_tensor_without_dimensions_does_not_widen_another() -> None:
    agrees(lambda x, y: x + y, some(torch.float32, 4), torch.tensor(2.0, dtype=torch.float64))


def test_logic_of_numbers_asks_whether_they_are_zero() -> None:
    x, y = torch.tensor([0.0, 2.0, -1.0, 0.0]), torch.tensor([0, 0, 3, 1])
    agrees(lambda a, b: (torch.logical_and(a, b), torch.logical_or(a, b), torch.logical_not(a), a.bool()), x, y)


def test_booleans_add_multiply_and_compare() -> None:
    agrees(lambda x, y: (x + y, x * y, x < y, x == y, x ^ y, ~x), some(torch.bool, 8), some(torch.bool, 8))


def test_booleans_are_chosen_and_filled() -> None:
    agrees(lambda m, x, y: (torch.where(m, x, y), x.masked_fill(m, True)), *(some(torch.bool, 6) for _ in range(3)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits(dtype: torch.dtype) -> None:
    agrees(lambda x, y: (x & y, x | 3, x ^ y, ~x), some(dtype, 5), some(dtype, 5))


@pytest.mark.parametrize("to", [torch.bool, torch.int32, torch.int64, torch.float16, torch.float64])
def test_casts_truncate_toward_zero(to: torch.dtype) -> None:
    agrees(lambda x: x.to(to), torch.tensor([-2.7, -0.5, 0.0, 0.5, 2.7]))


def test_numbers_that_are_not() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1.0])
    agrees(lambda x: (x.isnan(), x.isinf(), x.isfinite(), x.nan_to_num(), x.signbit(), x.sign()), x, exact=True)
    agrees(lambda x: (torch.fmax(x, x.flip(0)), torch.fmin(x, x.flip(0)), torch.log1p(x), torch.atan2(x, x.flip(0))), x)


def test_extremes_pass_on_what_is_not_a_number() -> None:
    x = torch.tensor([[1.0, torch.nan, 2.0], [3.0, 1.0, 2.0]])
    agrees(lambda x: (x.amax(1), x.amin(1), torch.maximum(x, x.flip(1)), x.clamp(0, 2), x.relu()), x)
    agrees(lambda x: (x.max(1), x.min(1), x.argmax(1), x.argmin(0), torch.linalg.vector_norm(x, torch.inf, 1)), x)


@pytest.mark.parametrize("descending", [False, True])
def test_what_is_not_a_number_is_sorted_behind_every_number(descending: bool) -> None:
    x = torch.tensor([3.0, torch.nan, -torch.inf, torch.inf, 1.0, torch.nan])
    agrees(lambda x: (x.sort(descending=descending), x.topk(4, largest=descending)), x)


def test_norms_of_half_precision_do_not_overflow() -> None:
    x = torch.full((64,), 200.0, dtype=torch.float16)
    agrees(lambda x: (torch.linalg.vector_norm(x), x.var(), torch.linalg.vector_norm(x, 3)), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
def test_scattered_values_add_up(dtype: torch.dtype) -> None:
    index = torch.tensor([[0, 1, 0, 2], [2, 2, 1, 0]])
    agrees(lambda x, s: x.scatter_add(1, index, s), some(dtype, 2, 3), some(dtype, 2, 4))


def test_convolution_of_integers_is_refused_with_the_reason() -> None:
    function = onnx(torch.nn.functional.conv1d)
    with pytest.raises(Exception, match="Conv does not take int64") as caught:
        function(some(torch.int64, 1, 2, 5), some(torch.int64, 3, 2, 2))
    assert isinstance(getattr(caught.value, "inner_exception", caught.value), UnsupportedOperator)


def test_activations_in_double_precision() -> None:
    x = torch.tensor([-800.0, -40, -5, -3, -1, -1e-9, -0.0, 0.0, 1e-20, 1e-9, 0.3, 2, 3, 40, 800])
    x = torch.cat([x.double(), torch.linspace(-4, 4, 41, dtype=torch.float64), torch.tensor([torch.nan])])

    def activations(x: torch.Tensor) -> list[torch.Tensor]:
        same = (F.hardswish, F.hardsigmoid, F.leaky_relu, F.elu, F.selu, F.celu, torch.expm1)
        return [*(f(x) for f in same), F.gelu(x, approximate="tanh")]

    torch.testing.assert_close(onnx(activations)(x), activations(x), rtol=1e-14, atol=1e-14, equal_nan=True)


def test_factors_of_products_in_double_precision_are_not_rounded_to_floats() -> None:
    def products(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        attention = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        added = torch.addmm(x[0] @ y[0], x[0], y[0], alpha=0.1, beta=0.7)
        return (x * 0.1) @ y, (x @ y) * 0.1, (x @ y) / 0.3, added, attention

    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(onnx(products)(x, y), products(x, y), rtol=1e-14, atol=1e-14)
