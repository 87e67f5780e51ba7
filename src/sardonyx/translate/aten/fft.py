"""Discrete Fourier transforms, as products with constant matrices.

ONNX Runtime's DFT is up to ten times slower than a matrix of a usual size, and in single precision it keeps only three
or four digits unless the size is a power of two. It is used, in double precision, for sizes that are symbolic, very
large or have a large prime factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate import complex_as_real
from sardonyx.translate.aten import shape
from sardonyx.translate.aten.complex import conj
from sardonyx.translate.builder import Builder
from sardonyx.translate.complex_as_real import aten_complex
from sardonyx.translate.table import aten

Value = ir.Value

_SMALL = 64
"""Up to this size one matrix is as fast as two steps."""
_LARGEST = 512
"""The largest size of a matrix."""
_LARGEST_CONSTANT = 2**22
"""The maximum number of elements of the matrices of a transform in two steps."""
_POWERS = {0: 0.0, 1: -0.5, 2: -1.0}
"""torch's codes of normalization: the result is multiplied by this power of the size."""


@aten("_fft_c2c")
@aten_complex("_fft_c2c")
def fft_c2c(g: Builder, x: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    for axis in dim:
        axis %= g.rank(x) - 1
        last = _transform(g, _to_last(g, x, axis), -1 if forward else 1, _POWERS[normalization])
        x = complex_as_real.mark(_from_last(g, last, axis))
    return x


@aten("_fft_r2c")
@aten_complex("_fft_r2c")
def fft_r2c(g: Builder, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Value:
    axis, power = dim[-1] % g.rank(x), _POWERS[normalization]
    size, count = g.dims(x)[axis], complex_as_real.dims_of(g.out)[axis]
    x = _to_last(g, g.unsqueeze(x, [-1]), axis)
    if isinstance(size, int) and size <= _LARGEST:
        spectrum = _times(g, x, _matrix(size, -1, power)[:, :1, :count])
    else:
        lead = g.dims(x)[:-2]
        widened = g.shaped(g.Pad(x, g.ints([0, 1]), None, g.ints([-1])), [*lead, size, 2])
        spectrum = _transform(g, widened, -1, power)
        spectrum = g.shaped(g.slice(spectrum, len(lead), 0, count), [*lead, count, 2])
    return fft_c2c(g, complex_as_real.mark(_from_last(g, spectrum, axis)), dim[:-1], normalization, True)


@aten("_fft_c2r")
@aten_complex("_fft_c2r")
def fft_c2r(g: Builder, x: Value, dim: Sequence[int], normalization: int, last_dim_size: Dim) -> Value:
    """Transform the given half spectrum and its mirror image, whose result is real."""
    x = fft_c2c(g, x, dim[:-1], normalization, False)
    axis, power = dim[-1] % (g.rank(x) - 1), _POWERS[normalization]
    size, half = last_dim_size, g.dims(x)[axis]
    if isinstance(size, int) and half != size // 2 + 1:
        raise Unsupported(f"a real signal of size {size} from {half} frequencies")
    x = _to_last(g, x, axis)
    if isinstance(size, int) and isinstance(half, int) and size <= _LARGEST:
        times = np.array([1 if k in (0, size - k) else 2 for k in range(half)])
        signal = _times(g, x, _matrix(size, 1, power)[:half, :, :, :1] * times[:, None, None, None])
    else:
        signal, _ = complex_as_real.split(g, _transform(g, _mirrored(g, x, size), 1, power))
    return g.squeeze(_from_last(g, signal, axis), [-1])


def _mirrored(g: Builder, x: Value, size: Dim) -> Value:
    """Return the full spectrum of a real signal from its first half."""
    *lead, half, _ = g.dims(x)
    rest = g.shaped(g.slice(x, len(lead), 1, size - half + 1), [*lead, size - half, 2])
    mirror = conj(g, complex_as_real.mark(shape.flip(g, rest, [len(lead)])))
    return g.shaped(g.Concat(x, mirror, axis=len(lead)), [*lead, size, 2])


def _to_last(g: Builder, x: Value, axis: int) -> Value:
    """Move an axis before the last."""
    last = g.rank(x) - 1
    return g.transpose(x, [*(i for i in range(last) if i != axis), axis, last])


def _from_last(g: Builder, x: Value, axis: int) -> Value:
    order = list(range(g.rank(x) - 2))
    order.insert(axis, g.rank(x) - 2)
    return g.transpose(x, [*order, g.rank(x) - 1])


def _transform(g: Builder, x: Value, sign: int, power: float) -> Value:
    """Return sums of x·exp(sign·2πi·jk/n) over the second-last axis, times a power of its size n."""
    size = g.dims(x)[-2]
    steps = _two_factors(size) if isinstance(size, int) and size > _SMALL else None
    if steps is not None:
        return _in_two_steps(g, x, *steps, sign, power)
    if isinstance(size, int) and size <= _LARGEST:
        return _times(g, x, _matrix(size, sign, power))
    return _by_engine(g, x, sign, power)


def _matrix(size: int, sign: int, power: float) -> np.ndarray:
    """Return the matrix of a transform: from j and its part to k and its part."""
    matrix: np.ndarray = _roots_of_unity(np.arange(size), size, size, sign) * float(size) ** power
    return matrix


def _roots_of_unity(j: np.ndarray, count: int, size: int, sign: int) -> np.ndarray:
    """Return exp(sign·2πi·jk/size) for k < count, as real matrices from the parts of each j to the parts of each k."""
    jk = j[..., None] * np.arange(count) % size  # keeps the angle exact
    turns = np.exp(sign * 2j * np.pi * jk / size)
    from_real, from_imaginary = (np.stack([z.real, z.imag], -1) for z in (turns, 1j * turns))
    return np.stack([from_real, from_imaginary], -3)


def _two_factors(size: int) -> tuple[int, int] | None:
    """Return the factors of a size for the fastest transform in two steps; None if its matrices are too large."""
    most = min(_LARGEST, _LARGEST_CONSTANT // (4 * size))
    factors = [(p, size // p) for p in range(2, most + 1) if size % p == 0 and size // p <= _LARGEST]
    return min(factors, key=sum, default=None)


def _in_two_steps(g: Builder, x: Value, p: int, q: int, sign: int, power: float) -> Value:
    """With j = j₁q + j₂ and k = k₁ + k₂p, jk/pq = jk₁/pq + j₂k₂/q modulo 1: sum over j₁, then over j₂."""
    dims = g.dims(x)
    rows = math.prod(dims[:-2])
    j = np.arange(p * q).reshape(p, q).T
    first = _roots_of_unity(j, p, p * q, sign).reshape(q, 2 * p, 2 * p) * float(p) ** power
    x = g.transpose(g.reshape(x, [rows, p, q, 2]), [2, 0, 1, 3])
    x = g.shaped(g.MatMul(g.reshape(x, [q, rows, 2 * p]), _constant(g, first)), [q, rows, 2 * p])
    x = g.transpose(g.reshape(x, [q, rows, p, 2]), [1, 2, 0, 3])
    return g.reshape(g.transpose(_times(g, x, _matrix(q, sign, power)), [0, 2, 1, 3]), dims)


def _times(g: Builder, x: Value, matrix: np.ndarray) -> Value:
    """Multiply the last two axes of `x` by the first two of the matrix."""
    lead, inner, outer = g.dims(x)[:-2], matrix.shape[:2], matrix.shape[2:]
    flat = matrix.reshape(math.prod(inner), math.prod(outer))
    rows = math.prod(lead)
    result = g.MatMul(g.reshape(x, [rows, math.prod(inner)]), _constant(g, flat))
    return g.reshape(g.shaped(result, [rows, math.prod(outer)]), [*lead, *outer])


def _constant(g: Builder, array: np.ndarray) -> Value:
    return g.constant(dtypes.to_array(torch.from_numpy(array).to(g.out.dtype.to_real())))


def _by_engine(g: Builder, x: Value, sign: int, power: float) -> Value:
    """Use the engine's DFT. Its inverse divides in single precision, so the forward one is used for both."""
    if g.opset < opsets.GELU:
        raise Unsupported(f"a Fourier transform of this size before opset 20 (this is {g.opset})")
    dims = g.dims(x)
    x = g.cast(complex_as_real.mark(g.reshape(x, [math.prod(dims[:-2]), *dims[-2:]])), torch.complex128)
    x = x if sign < 0 else conj(g, x)
    x = complex_as_real.mark(g.shaped(g.DFT(x, None, g.scalar(1, torch.int64)), g.dims(x)))
    x = x if sign < 0 else conj(g, x)
    if power:
        factor = g.Pow(g.scalar(dims[-2], torch.float64), g.scalar(power, torch.float64))
        x = complex_as_real.mark(g.Mul(x, factor))
    return g.reshape(g.cast(x, g.out.dtype.to_complex()), dims)
