"""Arithmetic at the edges of every dtype: overflow, division, signs of zero, infinities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import sardonyx
from sardonyx.errors import EngineError

from .agreement import onnx

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Function = Callable[..., Any]


def same(result: Any, expected: Any) -> None:
    """Assert equal dtypes, shapes and values, with the signs of zeros."""
    for got, wanted in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        if got.is_floating_point():
            assert torch.equal(got.signbit() & ~got.isnan(), wanted.signbit() & ~wanted.isnan())


def exact(functions: Sequence[Function], *args: torch.Tensor) -> None:
    """Assert that every function is bit for bit torch's, with nothing left to torch."""
    compiled = onnx(lambda *given: [function(*given) for function in functions])
    same(compiled(*args), [function(*args) for function in functions])


def pairs(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [part.reshape(-1) for part in torch.meshgrid(x, y, indexing="ij")]


def truncated(x: Any, y: Any) -> torch.Tensor:
    return torch.div(x, y, rounding_mode="trunc")


def edges(dtype: torch.dtype) -> torch.Tensor:
    """Numbers around the limits and zero, without zero."""
    limits = torch.iinfo(dtype)
    near = [limits.min, limits.min + 1, limits.max - 1, limits.max, 1, 2, 3, 7, 100, -1, -2, -3, -7, -100]
    wide = [2**53 + 1, -(2**53) - 1, 1_700_000_000_123_456_789] if dtype == torch.int64 else []
    return torch.tensor([n for n in near + wide if n and limits.min <= n <= limits.max], dtype=dtype)


# Integer division

DIVISIONS = (torch.floor_divide, torch.remainder, torch.fmod, lambda x, y: x // 3, lambda x, y: 7 // y)


def test_floor_division_of_every_pair_of_bytes() -> None:
    every = torch.arange(-128, 128).to(torch.int8)
    exact(
        [*DIVISIONS, lambda x, y: x // -3, lambda x, y: x // -1, lambda x, y: x % -1], *pairs(every, every[every != 0])
    )


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_divide_exactly_up_to_their_limits(dtype: torch.dtype) -> None:
    exact(DIVISIONS, *pairs(torch.cat([edges(dtype), torch.zeros(1, dtype=dtype)]), edges(dtype)))


def test_quotients_toward_zero_are_exact() -> None:
    x, y = pairs(edges(torch.int64), edges(torch.int64)[:-4])
    allowed = (x != torch.iinfo(torch.int64).min) | (y != -1)  # there torch itself traps
    exact([truncated], x[allowed], y[allowed])


def test_a_division_of_integers_by_zero_is_an_error() -> None:
    x, y = torch.tensor([5, 7]), torch.tensor([0, 1])
    for function in (torch.floor_divide, torch.remainder, torch.fmod):
        with pytest.raises(EngineError, match="by zero"):
            onnx(function)(x, y)


def test_booleans_divide_as_numbers() -> None:
    flags = torch.tensor([True, False, True, False, True, True, False])
    real = torch.tensor([0.5, -2.0, math.inf, -math.inf, -1e-38, 0.0, -0.0])
    whole = torch.tensor([1, -2, 3, 4, -5, 7, 9])
    both = [lambda b, r, n, f=f: (f(b, r), f(b, n)) for f in (torch.floor_divide, torch.remainder, torch.fmod)]
    exact([*both, lambda b, r, n: b // 2, lambda b, r, n: b // -2.5, lambda b, r, n: r // b], flags, real, whole)


# Sums and products


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_and_products_of_integers_wrap_around(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, (4, 5, 6), dtype=dtype)
    sums = [
        lambda x: (x.sum(), x.sum(0), x.sum((1, 2), keepdim=True), x.sum((0, 2)), x[0].trace(), x.nansum(1)),
        lambda x: (x.sum(dtype=torch.int32), x.sum(1, dtype=torch.int8), torch.einsum("ijk->ik", x)),
        lambda x: (x.prod(), x.prod(1), x.prod(2, keepdim=True), x.prod(1, dtype=torch.int32)),
        lambda x: (x.cumsum(1), x.cumprod(1), x @ x.mT, torch.addbmm(x[0, :, :5], x, x.mT)),
        lambda x: (x.scatter_add(1, x.abs() % 5, x) if dtype == torch.int64 else x, x.max(1), x.sort(1)[0]),
    ]
    exact(sums, x)


def test_sums_of_three_large_numbers_are_exact() -> None:
    x = torch.tensor([1_700_000_000_123_456_789] * 3)
    assert onnx(lambda x: x.sum())(x).item() == 5_100_000_000_370_370_367


def test_sums_and_products_of_any_size_are_exact() -> None:
    function = onnx(lambda x: (x.sum(), x.sum(1), x.prod(0), x.prod(), x.int().sum(0), (x > 0).sum()), dynamic=True)
    for shape in ((3, 4), (7, 5)):
        x = torch.randint(-(2**62), 2**62, shape)
        same(function(x), (x.sum(), x.sum(1), x.prod(0), x.prod(), x.int().sum(0), (x > 0).sum()))


class _Division(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x // y, torch.fmod(x, 1000), x.sum(), x.prod(), (x > 0).long().sum(-1)


def test_exported_integer_arithmetic_is_exact() -> None:
    x, y = pairs(edges(torch.int64), edges(torch.int64))
    program = sardonyx.export(_Division(), (x, y))
    same(program(x, y), _Division()(x, y))
    assert [node.op_type for node in program.model.graph].count("ReduceSum") == 1, "of the mask, whose sum is small"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_exported_linear_layers_of_integers_wrap_around(dtype: torch.dtype) -> None:
    class Linear(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
            linear = torch.nn.functional.linear
            return linear(x, weight, bias), linear(x[None], weight), linear(x[0], weight, bias)

    given = [edges(dtype)[:12].view(4, 3), edges(dtype)[:6].view(2, 3), edges(dtype)[:2]]
    same(sardonyx.export(Linear().eval(), given)(*given), Linear()(*given))


# Floating point


def numbers(dtype: torch.dtype) -> torch.Tensor:
    given = [0.0, 1.0, 0.5, 0.3, 2.5, 3.0, math.inf, 1e-3, 100.0]
    return torch.tensor([math.nan, *given, *(-n for n in given)], dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_real_quotients_and_remainders_of_all_signs(dtype: torch.dtype) -> None:
    scalars = [lambda x, y, n=n: (x // n, x % n) for n in (2, -2.5, math.inf, -math.inf)]
    reverse = [lambda x, y: (2 // y, 2 % y, 0 // y)]
    exact(
        [torch.floor_divide, truncated, torch.remainder, torch.fmod, *scalars, *reverse], *pairs(*[numbers(dtype)] * 2)
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_keep_their_signs(dtype: torch.dtype) -> None:
    x, y = pairs(*[numbers(dtype)] * 2)
    binary = [
        lambda x, y: (x * y, torch.copysign(x, y), torch.where(x > y, x, y), torch.where(x > 0, 1.0, x)),
        lambda x, y: (torch.where(x < 1, x, 3.0), x.masked_fill(y > 0, -0.0), torch.heaviside(x, y), x - y),
    ]
    exact(binary, x, y)
    unary = [
        lambda x: (
            x.signbit(),
            torch.copysign(x, -0.0),
            x.trunc(),
            x.frac(),
            x.round(),
            x.ceil(),
            -x,
            x.sign(),
            x.abs(),
        ),
        lambda x: (1 / x, 1 / (x * 0), 1 / (x * 1.5 + 0), 1 / (0 + x * 1.5), 1 / (0 - x), 1 / (x * 1.5 - 0), x**-1),
        lambda x: (1 / (x * 1.5 - (-0.0)), x + 0, x * -1, x / 1, x**2, x**3, x**0.5, x**-0.5, (x * 0).log1p()),
    ]
    exact(unary, numbers(dtype))


def test_angles_of_points_on_the_axes() -> None:
    y, x = pairs(*[numbers(torch.float32)] * 2)
    got, wanted = onnx(torch.atan2)(y, x), torch.atan2(y, x)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    assert torch.equal(got.signbit() & ~got.isnan(), wanted.signbit() & ~wanted.isnan())


def test_numbers_beyond_half_precision_are_finite_factors() -> None:
    x = torch.tensor([0.0, -0.0, 1e-4, -1.0, math.inf, math.nan], dtype=torch.float16)
    exact([lambda x: (x * 1e9, x / 1e9, x + 1e9, x - 1e9, 1e9 / x, 1e9 - x)], x)
    exact([lambda x: (x + 1e9, x + 1e5, x - 1e5)], torch.tensor([-65504.0, -math.inf, 65504.0, math.inf]).half())


def test_numbers_below_half_precision_are_nonzero_factors() -> None:
    x = torch.tensor([1e3, -2e4, 1e-3, 0.0, math.inf, math.nan], dtype=torch.float16)
    exact([lambda x: (x * 1e-9, x / 1e-9, x * 1e-6, x / 1e-6, 1e-9 / x)], x)


NUMBERS = (2.5, 0.1, 1e6, 1e-9, -3e5)
NUMBER_FUNCTIONS: dict[str, Function] = {
    "mul": lambda x, k: (x * k, k * x, x * (k * 2)),
    "div": lambda x, k: (x / k, k / x),
    "add": lambda x, k: (x + k, k + x),
    "sub": lambda x, k: (x - k, k - x),
    "pow": lambda x, k: k**x,
    "floor_divide": lambda x, k: x // k,
    "truncated quotient": lambda x, k: torch.div(x, k, rounding_mode="trunc"),
    "remainder": lambda x, k: (x % k, torch.fmod(x, k)),
}


class Called(torch.nn.Module):
    """Calls a function."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, number: float) -> Any:
        return self.function(x, number)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NUMBER_FUNCTIONS)
def test_number_inputs_are_rounded_to_half_precision_only_where_torch_does(name: str, dtype: torch.dtype) -> None:
    function = NUMBER_FUNCTIONS[name]
    x = torch.tensor([1e-3, 2e-3, -1e-4, 1.0, 3.0, 10.0, -2e4, 3e4], dtype=dtype)
    exported = sardonyx.export(Called(function).eval(), (x, 2.5))
    compiled = onnx(function, dynamic=True)
    for number in NUMBERS:
        same(exported(x, number), function(x, number))
        same(compiled(x, number), function(x, number))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tensors_without_dimensions_are_factors_in_their_own_precision(dtype: torch.dtype) -> None:
    x = torch.tensor([1e-3, -1e-4, 3.0, 2e4], dtype=dtype)
    for number in (torch.tensor(1e6), torch.tensor(1e-9, dtype=torch.float64), torch.tensor(100001)):
        exact([lambda x, k: (x * k, x / k, x + k, x // k)], x, number)


def test_sizes_beyond_half_precision_are_finite_factors() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * y.shape[0], x / y.shape[0]

    x, y = torch.tensor([1e-3, -1e-4, 3.0, 2e4]).half(), torch.zeros(100001)
    same(onnx(function, dynamic=True)(x, y), function(x, y))


def test_nan_to_num_replaces_only_what_was_there() -> None:
    exact([torch.nan_to_num, lambda x: x.nan_to_num(math.inf, -1.0, math.nan)], numbers(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_casts_of_what_no_integer_is(dtype: torch.dtype) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 3e9, -3e9, 1e19, 300.5, -300.5, 70000.0, -0.0], dtype=dtype)
    kinds = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    exact([lambda x: [x.to(kind) for kind in kinds], lambda x: x.nan_to_num().long()], x)


CASTS = (
    (torch.float64, torch.int64, torch.int32),
    (torch.float32, torch.int64, torch.int32),
    (torch.bfloat16, torch.int64, torch.int32),
    (torch.float64, torch.int64, torch.uint8),
    (torch.int64, torch.float64, torch.int32),
    (torch.int64, torch.float32, torch.int16),
    (torch.float64, torch.float32, torch.int8),
    (torch.float32, torch.float16, torch.uint8),
    (torch.int32, torch.bfloat16, torch.int8),
)


def test_two_casts_lose_what_the_first_does() -> None:
    numbers = [1.7, -1.7, 70000, -70000, 2**24 + 1, 2**31 + 261, 2**32 + 7, -(2**31) - 7, 2**40 + 3, 2**52 - 1]
    wide = torch.tensor(numbers, dtype=torch.float64)

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        return [x.to(first).to(second) for x, (_, first, second) in zip(given, CASTS, strict=True)]

    given = [wide.to(dtype) for dtype, _, _ in CASTS]
    same(onnx(function)(*given), function(*given))


def test_a_byte_of_a_double_is_the_low_bits_of_a_long() -> None:
    exact([lambda x: x.byte()], torch.tensor([2**31 + 261, 2**32 + 7, -(2**31) - 7, 2**52 - 1, 300.5]).double())


def test_numbers_beyond_a_dtype_are_taken_as_torch_takes_them() -> None:
    x = torch.tensor([44, -128, 127, 3, -1], dtype=torch.int8)
    edges = torch.tensor([-500, 0, 100, 300])
    functions = [
        lambda x: (torch.nan_to_num(x, 1.5, 1000.0, -1000.0), torch.isin(x, 300), torch.bucketize(x, edges)),
        lambda x: (x == 300, x < 300, x > -300, x + 300, x * 300, x // 300, torch.searchsorted(x.sort()[0], 300)),
    ]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: [f(x) for f in functions], backend="sardonyx", options={"fallback": "quiet"})
    same(compiled(x), [f(x) for f in functions])


# Order


def disordered(dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    near = [3.0, math.nan, math.inf, most, -math.inf, -most, 1.0, math.nan, math.inf, 2.0, -math.inf, -2.0, most, 5.0]
    return torch.tensor(near, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_are_ordered_between_numbers_and_nan(dtype: torch.dtype) -> None:
    functions = [
        lambda x: [x.sort(stable=True, descending=down) for down in (False, True)],
        lambda x: [torch.argsort(x, stable=True, descending=down) for down in (False, True)],
        lambda x: [x.topk(k, largest=most)[0] for k in (3, 5, 9) for most in (False, True)],
        lambda x: [x.kthvalue(k)[0] for k in (1, 3, 8, 11, 12, 14)],
        lambda x: (x.nanmedian(), x.median(), torch.msort(x.reshape(7, 2)), x[8:].mode(0)[0]),
        lambda x: (x.argmax(), x[2:5].argmax(), x[3:7].argmax(), x[4:6].argmin(), x[5:7].argmin(), x.argmin()),
        lambda x: (x.reshape(7, 2).max(0), x[2:6].reshape(2, 2).max(1), x.amax(), x[8:].min(0)),
    ]
    exact(functions, disordered(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_search_among_infinities_and_nan(dtype: torch.dtype) -> None:
    x = disordered(dtype)
    rows = torch.stack([x[:6], x[6:12], x[[1, 1, 1, 1, 1, 3]]])
    functions = [
        lambda x, rows: [torch.searchsorted(x.sort()[0], x, right=right) for right in (False, True)],
        lambda x, rows: [torch.bucketize(x, x.sort()[0], right=right) for right in (False, True)],
        lambda x, rows: [torch.searchsorted(rows.sort(1)[0], rows, right=right) for right in (False, True)],
        lambda x, rows: torch.searchsorted(x, rows, sorter=x.argsort(stable=True)),
    ]
    exact(functions, x, rows)


def test_logarithms_of_sums_pass_nan_on() -> None:
    nan, inf = math.nan, math.inf
    rows = torch.tensor([[inf, nan], [nan, inf], [-inf, nan], [nan, 1], [inf, -inf], [-inf, -inf], [0, 0]])
    exact([lambda x: torch.logsumexp(x, 1), lambda x: torch.logsumexp(x, (0, 1), keepdim=True)], rows)


def test_scattered_extremes_pass_nan_on() -> None:
    x = disordered(torch.float32)[:12].reshape(3, 4)
    index = torch.tensor([[0, 1, 1, 0]] * 3)
    exact([lambda x, kind=kind: x.scatter_reduce(1, index, x, kind) for kind in ("amax", "amin")], x)


# Comparisons of int64 in vector registers, of which ONNX Runtime's kernels compare 32 bits


def wide_numbers() -> torch.Tensor:
    """Every pair of numbers whose low and high halves order them differently, in rows of several registers."""
    bounds = [2**31, 2**31 - 1, 2**32, 2**32 + 1, 2**32 - 1, 2**53 + 1, 2**53 - 1, 2**63 - 1]
    numbers = torch.tensor([0, 1, 2, -7, *bounds, *(-n for n in bounds), -(2**63)])
    return torch.stack(pairs(numbers, numbers))


def test_larger_and_smaller_numbers_of_64_bits() -> None:
    x, y = wide_numbers()
    exact(
        [
            *(torch.maximum, torch.minimum, torch.fmax, torch.fmin, lambda x, y: x.clamp(y, y + 1)),
            *(lambda x, y: torch.maximum(x, y[3]), lambda x, y: torch.minimum(x[5], y)),
            *(lambda x, y: x.clamp(-(2**31), 2**32), lambda x, y: x.clamp(min=2**32), lambda x, y: x.clamp(max=5)),
            *(lambda x, y: torch.sign(x), lambda x, y: torch.sgn(x), lambda x, y: torch.relu(x)),
            *(lambda x, y: torch.nn.functional.relu6(x), lambda x, y: torch.nn.functional.hardtanh(x, -2, 2**33)),
        ],
        *(x, y),
    )


EXTREMES: tuple[Function, ...] = (
    *(torch.amax, torch.amin, torch.max, torch.min, torch.aminmax),
    *(lambda x: x.amax(0), lambda x: x.amin(1, keepdim=True), lambda x: x.amax((0, 1), keepdim=True)),
    *(lambda x: x.max(1), lambda x: x.min(0), lambda x: x.aminmax(dim=0)),
)


def wide_rows() -> torch.Tensor:
    """Rows of positive and rows of negative numbers, whose extremes differ from those of their low halves."""
    row = torch.tensor([7, 2**31 + 1, 2**31, 2**32 + 1, 2**32, 3, 2**53 - 1, 2**53 + 1])
    return torch.cat([row.expand(6, 8), -row.expand(6, 8)])


def test_extremes_of_64_bits() -> None:
    exact([*EXTREMES, lambda x: x[:6].amin(), lambda x: x[6:].amax()], wide_rows())


def test_extremes_of_64_bits_over_symbolic_sizes() -> None:
    def function(x: torch.Tensor) -> list[Any]:
        return [extreme(x) for extreme in EXTREMES]

    compiled, rows = onnx(function, dynamic=True), wide_rows()
    for some in (rows, rows[:3], rows[6:]):
        same(compiled(some), function(some))


def test_an_exported_program_compares_64_bits() -> None:
    class Largest(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.maximum(x, y), x.amax()

    x, y = wide_numbers()
    same(sardonyx.export(Largest(), (x, y))(x, y), Largest()(x, y))
