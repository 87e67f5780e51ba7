"""Random numbers, all computed from random inputs that are uniform in [0, 1) or standard normal.

On the CPU with the same seed, contiguous results of these equal eager's up to rounding: rand, randn and their
variants, uniform, normal, exponential, bernoulli of a tensor, multinomial without replacement. The others have eager's
distribution.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import element_count
from sardonyx.translate.aten.pooling import argmax_last_axis, max_pool_backward
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value
_LARGEST_RANGE = 2**53
"""The number of integers that a double represents exactly."""
_MOST_PAIRS = 2**26
"""Drawing with replacement compares every sample with every category."""


@aten("rand", "rand.generator", "rand_like", "rand_like.generator")
def rand(g: Builder, shape: Any, *, generator: Any = None, **ignored: Any) -> Value:
    return _uniform(g, generator, g.out.dtype)


@aten("randn", "randn.generator", "randn_like", "randn_like.generator")
def randn(g: Builder, shape: Any, *, generator: Any = None, **ignored: Any) -> Value:
    return _normal(g, generator)


def _uniform(g: Builder, generator: Any, dtype: torch.dtype = torch.float64) -> Value:
    """Return uniform numbers in the shape of the result; in double precision by default, for accurate tails."""
    _require_default_generator(generator)
    return g.uniform(g.like(g.out), dtype)


def _normal(g: Builder, generator: Any) -> Value:
    _require_default_generator(generator)
    return g.normal(g.like(g.out), g.out.dtype)


def _require_default_generator(generator: Any) -> None:
    if generator is not None:
        raise Unsupported("numbers are drawn from torch's default generator only")


@aten("uniform")
def uniform(g: Builder, x: Value, low: float = 0, high: float = 1, *, generator: Any = None) -> Value:
    dtype = g.out.dtype
    return g.Add(g.Mul(_uniform(g, generator, dtype), g.scalar(high - low, dtype)), g.scalar(low, dtype))


@aten("normal_functional")
def normal_functional(g: Builder, x: Value, mean: float = 0, std: float = 1, *, generator: Any = None) -> Value:
    return normal(g, mean, std, generator=generator)


@aten("normal.float_float", "normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def normal(
    g: Builder, mean: Operand, std: Operand = 1, size: Any = None, *, generator: Any = None, **ignored: Any
) -> Value:
    dtype = g.out.dtype
    return g.Add(g.Mul(_normal(g, generator), g.cast(std, dtype)), g.cast(mean, dtype))


@aten("log_normal")
def log_normal(g: Builder, x: Value, mean: float = 1, std: float = 2, *, generator: Any = None) -> Value:
    return g.Exp(normal(g, mean, std, generator=generator))


@aten("cauchy")
def cauchy(g: Builder, x: Value, median: float = 0, sigma: float = 1, *, generator: Any = None) -> Value:
    _require_default_generator(generator)
    # The ratio of two normal numbers is Cauchy-distributed, with tails up to the limit of the dtype.
    over, under = (g.normal(g.like(g.out)) for _ in range(2))
    ratio = g.Div(over, under)
    return g.cast(g.Add(g.Mul(ratio, g.scalar(sigma, torch.float32)), g.scalar(median, torch.float32)), g.out.dtype)


def _standard_exponential(g: Builder, uniform: Value) -> Value:
    """−log(1 − u), never negative."""
    return g.Neg(g.Log(g.Sub(g.scalar(1, g.dtype(uniform)), uniform)))


@aten("exponential")
def exponential(g: Builder, x: Value, lambd: float = 1, *, generator: Any = None) -> Value:
    drawn = _standard_exponential(g, _uniform(g, generator))
    return g.cast(g.Div(drawn, g.scalar(lambd, torch.float64)), g.out.dtype)


@aten("geometric")
def geometric(g: Builder, x: Value, p: float, *, generator: Any = None) -> Value:
    # The number of trials until one succeeds: an exponential number, rounded up.
    rate = -torch.tensor(1 - p, dtype=torch.float64).log().item()
    trials = g.Ceil(g.Div(_standard_exponential(g, _uniform(g, generator)), g.scalar(rate, torch.float64)))
    return g.cast(g.Max(trials, g.scalar(1, torch.float64)), g.out.dtype)


# Integers


@aten("randint", "randint.generator")
def randint(g: Builder, high: Operand, size: Any, **options: Any) -> Value:
    return randint_low(g, 0, high, size, **options)


@aten("randint.low", "randint.low_generator")
def randint_low(g: Builder, low: Operand, high: Operand, size: Any, *, generator: Any = None, **ignored: Any) -> Value:
    if isinstance(low, int) and isinstance(high, int) and high - low > _LARGEST_RANGE:
        raise Unsupported("integers from a range wider than a double represents exactly")
    low, high = g.scalar(low, torch.int64), g.scalar(high, torch.int64)
    count = g.cast(g.Sub(high, low), torch.float64)
    offset = g.cast(g.Floor(g.Mul(_uniform(g, generator), count)), torch.int64)
    return g.cast(g.Add(offset, low), g.out.dtype)


@aten("randint_like", "randint_like.generator", "randint_like.Tensor", "randint_like.Tensor_generator")
def randint_like(g: Builder, x: Value, high: Operand, **options: Any) -> Value:
    return randint_low(g, 0, high, None, **options)


@aten("randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_like_low(g: Builder, x: Value, low: Operand, high: Operand, **options: Any) -> Value:
    return randint_low(g, low, high, None, **options)


@aten("randperm", "randperm.generator")
def randperm(g: Builder, n: Dim, *, generator: Any = None, **ignored: Any) -> Value:
    places = g.several("TopK", 2, [_uniform(g, generator), g.shape_value([n])], axis=0)[1]
    places.type = ir.TensorType(ir.DataType.INT64)
    return g.cast(places, g.out.dtype)


# Choices


def _bernoulli_mask(g: Builder, probability: Operand, like: torch.Tensor) -> Value:
    """Return True with the given probability, independently for each element."""
    wide = torch.float32
    if isinstance(probability, Value) and g.dtype(probability) == torch.float64:
        wide = torch.float64
    return g.Less(g.uniform(g.like(like), wide), g.cast(probability, wide))


@aten("bernoulli")
def bernoulli(g: Builder, probability: Value, *, generator: Any = None) -> Value:
    _require_default_generator(generator)
    return g.cast(_bernoulli_mask(g, probability, g.out), g.out.dtype)


@aten("bernoulli.p", "bernoulli.Tensor")
def bernoulli_p(g: Builder, x: Value, probability: Operand, *, generator: Any = None) -> Value:
    _require_default_generator(generator)
    return g.cast(_bernoulli_mask(g, probability, g.out), g.out.dtype)


@aten("native_dropout")
def native_dropout(g: Builder, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    result, mask = g.out
    if train is False:
        return x, g.expand(g.scalar(True, torch.bool), g.like(mask))
    mask = _bernoulli_mask(g, 1 - p, result)
    scale, zero = (g.scalar(number, result.dtype) for number in (0 if p == 1 else 1 / (1 - p), 0))
    return g.Mul(x, g.Where(mask, scale, zero)), mask


@aten("rrelu_with_noise_functional")
def rrelu_with_noise_functional(
    g: Builder, x: Value, noise: Value, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> tuple[Value, Value]:  # fmt: skip
    _require_default_generator(generator)
    dtype = g.dtype(x)
    positive = g.Greater(x, g.scalar(0, dtype))
    if not training:
        return g.Where(positive, x, g.Mul(x, g.scalar((lower + upper) / 2, dtype))), noise
    spread = g.Mul(g.uniform(g.dims(x), dtype), g.scalar(upper - lower, dtype))
    slope = g.Where(positive, g.scalar(1, dtype), g.Add(spread, g.scalar(lower, dtype)))
    return g.Mul(x, slope), slope


@aten("rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    g: Builder, grad: Value, x: Value, noise: Value, lower: float, upper: float, training: bool, is_result: bool
) -> Value:
    dtype = g.out.dtype
    if training and upper - lower > 1e-6:
        return g.Mul(grad, noise)
    slope = g.scalar((lower + upper) / 2, dtype)
    return g.Where(g.Greater(x, g.scalar(0, dtype)), grad, g.Mul(grad, slope))


@aten("multinomial")
def multinomial(g: Builder, weights: Value, count: Dim, replacement: bool = False, *, generator: Any = None) -> Value:
    """Exponential race: category i arrives after an exponential time of rate wᵢ, and the first ones are selected.

    Weights that torch would refuse (negative, infinite, none positive) are not detected.
    """
    _require_default_generator(generator)
    weights = g.cast(weights, torch.float64)
    *batch, categories = g.dims(weights)
    if not replacement:
        drawn = g.several("TopK", 2, [_speeds(g, weights), g.shape_value([count])], axis=-1)[1]
        drawn.type = ir.TensorType(ir.DataType.INT64)
        return drawn
    if not isinstance(count, int) or not isinstance(categories, int) or count * categories > _MOST_PAIRS:
        raise Unsupported(f"{count} samples of {categories} categories with replacement")
    weights = g.expand(g.unsqueeze(weights, [-2]), [*batch, count, categories])
    return g.ArgMax(_speeds(g, weights), axis=-1, keepdims=0)


def _speeds(g: Builder, weights: Value) -> Value:
    """Return the reciprocal of each arrival time."""
    times = _standard_exponential(g, g.uniform(g.dims(weights), torch.float64))
    # A time of exactly zero would give NaN for a category of weight zero, which would then be selected.
    return g.Div(weights, g.Max(times, g.scalar(1e-300, torch.float64)))


# Pooling over windows at random positions


@aten("fractional_max_pool2d")
def fractional_max_pool2d(
    g: Builder, x: Value, kernel: list[int], size: list[int], places: Value
) -> tuple[Value, Value]:
    return _fractional_max_pool(g, x, kernel, size, places, [1, 0])


@aten("fractional_max_pool3d")
def fractional_max_pool3d(
    g: Builder, x: Value, kernel: list[int], size: list[int], places: Value
) -> tuple[Value, Value]:
    return _fractional_max_pool(g, x, kernel, size, places, [0, 1, 2])


@aten("fractional_max_pool2d_backward", "fractional_max_pool3d_backward")
def fractional_max_pool_backward(
    g: Builder, grad: Value, x: Value, kernel: list[int], size: list[int], indices: Value
) -> Value:
    return max_pool_backward(g, grad, x, indices, len(kernel))


def _fractional_max_pool(
    g: Builder, x: Value, kernel: list[int], size: list[int], places: Value, order: list[int]
) -> tuple[Value, Value]:
    """Return the maximum of each window and its index; `order` maps axes to random numbers."""
    count = len(kernel)
    spatial, planes = g.dims(x)[-count:], element_count(g.dims(x)[:-count])
    places = g.reshape(places, [planes, count])
    if g.out[0].device.type == "cuda":  # torch rounds each step to half precision on the CPU alone
        places = g.cast(places, dtypes.accumulation_dtype(g.dtype(places)))
    at = g.scalar(0, torch.int64)
    for axis in range(count):
        place = g.shaped(g.slice(places, 1, order[axis], order[axis] + 1), [planes, 1])
        starts = _starts(g, place, spatial[axis], size[axis], kernel[axis])
        inside = g.ints(range(kernel[axis]))
        along = g.Add(g.reshape(starts, [planes, size[axis], 1]), inside)
        shape = [planes, *[1] * (2 * count)]
        shape[1 + axis], shape[1 + count + axis] = size[axis], kernel[axis]
        stride = g.scalar(element_count(spatial[axis + 1 :]), torch.int64)
        at = g.Add(at, g.Mul(g.reshape(along, shape), stride))
    windows = g.reshape(at, [planes, math.prod(size), math.prod(kernel)])
    flat = g.reshape(x, [planes, element_count(spatial)])
    gathered = g.GatherElements(flat, g.reshape(windows, [planes, math.prod(size) * math.prod(kernel)]), axis=1)
    best = argmax_last_axis(g, g.reshape(gathered, g.dims(windows)))
    where = g.reshape(g.GatherElements(windows, best, axis=2), [planes, math.prod(size)])
    result = [*g.dims(x)[:-count], *size]
    return g.reshape(g.GatherElements(flat, where, axis=1), result), g.reshape(where, result)


def _starts(g: Builder, place: Value, length: Dim, size: int, kernel: int) -> Value:
    """Return the start of each window along an axis, [planes, size]: about evenly spaced, the last at the end."""
    dtype = g.dtype(place)
    last = g.sizes.value(g.dim(length - kernel))
    if size == 1:
        return g.expand(last, [g.dims(place)[0], 1])
    step = g.Div(g.cast(last, dtype), g.scalar(size - 1, dtype))
    index = g.cast(g.ints(range(size)), dtype)
    moved = g.cast(g.Mul(g.Add(index, place), step), torch.int64)
    begun = g.cast(g.Mul(place, step), torch.int64)
    return g.Where(g.Equal(g.ints(range(size)), g.ints([size - 1])), last, g.Sub(moved, begun))
