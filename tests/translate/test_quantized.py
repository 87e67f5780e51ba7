"""Operators of models that are quantized already: codes and parameters are those of torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed

from tests.translate.agreement import agrees, agrees_at

Tensor = torch.Tensor
quantized = torch.ops.quantized_decomposed

FULL = [(torch.uint8, 0, 255), (torch.int8, -128, 127), (torch.int16, -32768, 32767), (torch.uint16, 0, 65535)]
NARROW = [(torch.int8, -127, 127), (torch.uint8, 0, 127), (torch.int8, -8, 7), (torch.uint8, 0, 15)]
SCALE, ZERO = 2**-4, 3
"""Of two, so that a quotient and a product with the reciprocal, which torch computes, are the same."""
X = torch.tensor([0.0, -0.0, 0.03125, 0.09375, -0.09375, 1.0, 30.0, -30.0, 1e30, -1e30, math.inf, -math.inf])
"""Ties, which go to even codes, and numbers beyond all codes."""


@pytest.mark.parametrize(("dtype", "low", "high"), FULL + NARROW)
def test_codes_are_rounded_to_even_and_saturate(dtype: torch.dtype, low: int, high: int) -> None:
    agrees(lambda x: quantized.quantize_per_tensor(x, SCALE, ZERO, low, high, dtype), X, exact=True)


@pytest.mark.parametrize(("dtype", "low", "high"), FULL)
def test_all_codes_are_dequantized(dtype: torch.dtype, low: int, high: int) -> None:
    codes = torch.arange(low, high + 1, dtype=torch.int32).to(dtype)
    agrees(lambda q: quantized.dequantize_per_tensor(q, 0.03, ZERO, low, high, dtype), codes, exact=True)


def test_codes_of_32_bits_are_dequantized_with_any_zero_point() -> None:
    low, high, codes = -(2**31), 2**31 - 1, torch.tensor([0, 1, -7, 10**6, -(10**6)], dtype=torch.int32)
    for zero in (0, 5):
        agrees(lambda q, z=zero: quantized.dequantize_per_tensor(q, 0.03, z, low, high, torch.int32), codes, exact=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_quantized_in_float32(dtype: torch.dtype) -> None:
    def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = quantized.quantize_per_tensor(x, SCALE, ZERO, 0, 255, torch.uint8)
        return codes, quantized.dequantize_per_tensor(codes, SCALE, ZERO, 0, 255, torch.uint8, out_dtype=dtype)

    agrees(there_and_back, torch.linspace(-3, 20, 50, dtype=dtype), exact=True)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 5, 1), (2, 3, 4)])
def test_tensors_of_any_shape(shape: tuple[int, ...]) -> None:
    agrees(lambda x: quantized.quantize_per_tensor(x, SCALE, 0, -128, 127, torch.int8), torch.randn(shape), exact=True)


def test_parameters_that_are_tensors() -> None:
    def there_and_back(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        codes = quantized.quantize_per_tensor.tensor(x, scale, zero, 0, 255, torch.uint8)
        return quantized.dequantize_per_tensor.tensor(codes, scale, zero, 0, 255, torch.uint8)

    agrees(there_and_back, X, torch.tensor([SCALE], dtype=torch.float64), torch.tensor([ZERO]), exact=True)
    agrees(there_and_back, X, torch.tensor(SCALE), torch.tensor(ZERO, dtype=torch.int32), exact=True)


def test_bounds_that_are_tensors() -> None:
    def codes(x: Tensor, scale: Tensor, zero: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return quantized.quantize_per_tensor.tensor2(x, scale, zero, low, high, torch.int8)

    agrees(codes, X, *map(torch.tensor, (SCALE, ZERO, -8, 7)), exact=True)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parameters_along_an_axis(axis: int) -> None:
    x, size = 40 * torch.randn(3, 4, 5), (3, 4, 5)[axis]
    scales, zeros = 2.0 ** -torch.arange(1, size + 1), torch.arange(size) * 20 - 30

    def there_and_back(x: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        codes = quantized.quantize_per_channel(x, scales, zeros, axis, -128, 127, torch.int8)
        return codes, quantized.dequantize_per_channel(codes, scales, zeros, axis, -128, 127, torch.int8)

    agrees(there_and_back, x, scales, zeros, exact=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_channels_without_zero_points(dtype: torch.dtype) -> None:
    codes, info = torch.randint(-128, 128, (3, 4)).to(dtype), torch.iinfo(dtype)

    def real(q: Tensor, scales: Tensor) -> Tensor:
        return quantized.dequantize_per_channel(q, scales, None, 1, info.min, info.max, dtype)

    agrees(real, codes, torch.rand(4), exact=True)


def _by_token(choose: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, ...]:
    scales, zeros = choose(x, torch.int8)
    codes = quantized.quantize_per_token(x, scales, zeros, -128, 127, torch.int8)
    return scales, zeros, quantized.dequantize_per_token(codes, scales, zeros, -128, 127, torch.int8, torch.float32)


def test_parameters_of_each_token() -> None:
    def by_token(x: Tensor) -> tuple[Tensor, ...]:
        return _by_token(quantized.choose_qparams_per_token_asymmetric, x)

    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(shape, generator=generator) for shape in ((2, 3, 8), (5, 1, 16)))
    agrees_at(by_token, (first,), (second,))


def test_symmetric_parameters_of_each_token() -> None:
    def by_token(x: Tensor) -> Tensor:
        return _by_token(quantized.choose_qparams_per_token, x)[2]

    agrees(by_token, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)), exact=True)


def test_tokens_of_one_sign_and_of_zeros() -> None:
    def parameters(x: Tensor) -> tuple[Tensor, Tensor]:
        return quantized.choose_qparams_per_token_asymmetric(x, torch.int8)

    agrees(parameters, torch.tensor([[1.0, 2.0], [-1.0, -2.0], [0.0, 0.0], [1e-30, 0.0]]), exact=True)


def test_groups_of_a_row() -> None:
    x, scales, zeros = 3 * torch.randn(6, 8), 2.0 ** -torch.arange(1, 13).view(6, 2), torch.arange(12).view(6, 2) % 5

    def there_and_back(x: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
        codes = quantized.quantize_per_channel_group(x, scales, zeros, -8, 7, torch.int8, 4)
        return codes, quantized.dequantize_per_channel_group(codes, scales, zeros, -8, 7, torch.int8, 4, torch.float32)

    agrees(there_and_back, x, scales, zeros, exact=True)


def test_a_row_that_is_shorter_than_a_group() -> None:
    codes, scales = torch.randint(-8, 8, (6, 8), dtype=torch.int8), torch.rand(6, 1)

    def real(q: Tensor, scales: Tensor) -> Tensor:
        return quantized.dequantize_per_channel_group(q, scales, None, -8, 7, torch.int8, 128, torch.float32)

    agrees(real, codes, scales, exact=True)


@pytest.mark.parametrize("x", [X[:9], torch.zeros(3), torch.tensor([1.0, 5.0]), torch.tensor([-1.0, -5.0])])
def test_parameters_that_are_chosen_in_each_call(x: Tensor) -> None:
    def parameters(x: Tensor) -> tuple[Tensor, ...]:
        affine = quantized.choose_qparams.tensor(x, 0, 255, 2**-12, torch.uint8)
        symmetric = quantized.choose_qparams_symmetric.tensor(x, -127, 127, 2**-12, torch.int8)
        return (*affine, *symmetric)

    agrees(parameters, x, exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_rows_of_8_bits(dtype: torch.dtype) -> None:
    weight, scales = torch.randint(-128, 128, (64, 32), dtype=torch.int8), torch.rand(64, dtype=dtype) / 100

    def product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, weight, scales)

    agrees(product, torch.randn(4, 32, dtype=dtype), weight, scales, exact=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("depth", [0, 1, 40])
def test_products_of_integers(dtype: torch.dtype, depth: int) -> None:
    info = torch.iinfo(dtype)
    x, weight = torch.full((20, depth), info.max, dtype=dtype), torch.full((depth, 8), -128, dtype=torch.int8)
    agrees(torch._int_mm, x, weight, exact=True)


def test_a_product_of_integers_whose_depth_may_be_zero() -> None:
    calls = [torch.randint(-128, 128, (20, depth), dtype=torch.int8) for depth in (16, 0, 8)]
    agrees_at(lambda x: torch._int_mm(x, x.t()), *((x,) for x in calls))


def _packed_int4(rows: int, depth: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight in the layout of torch's kernel, and the scale and zero of each group."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows, depth), generator=generator, dtype=torch.int32)
    parameters = torch.rand(depth // group, rows, 2, generator=generator) / 10
    return torch._convert_weight_to_int4pack_for_cpu(codes, 1), parameters.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "depth", "group"), [(16, 32, 32), (64, 64, 32), (80, 128, 64), (160, 256, 128)])
def test_products_with_packed_rows_of_4_bits(rows: int, depth: int, group: int, dtype: torch.dtype) -> None:
    def product(x: Tensor, weight: Tensor, parameters: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(x, weight, group, parameters)

    x = torch.randn(3, depth, generator=torch.Generator().manual_seed(1)).to(dtype)
    agrees(product, x, *_packed_int4(rows, depth, group, dtype), exact=True)
