"""Complex tensors, which ONNX sees as pairs of real numbers, and Fourier transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

from sardonyx.errors import UnsupportedOperator
from sardonyx.translate import complex_as_real, table

from .agreement import onnx

Z = torch.complex64


def z(*shape: int, dtype: torch.dtype = Z) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def agrees(function: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool = False, rtol: float = 1e-5) -> None:
    """Assert eager's dtypes and shapes, and the values of double precision up to `rtol` of the largest."""
    compiled = onnx(function, dynamic=dynamic)
    for args in calls:
        results = (tree_leaves(tree) for tree in (compiled(*args), function(*args), function(*tree_map(_wide, args))))
        for got, eager, exact in zip(*results, strict=True):
            assert (got.dtype, got.shape, got.is_conj()) == (eager.dtype, eager.shape, False)
            size = max(exact.abs().max().item(), 1) if exact.numel() and exact.dtype != torch.bool else 1
            torch.testing.assert_close(got, exact.to(got.dtype), rtol=rtol, atol=rtol * size)


def _wide(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_complex() or leaf.is_floating_point()):
        return leaf
    return leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)


def agrees_with_eager(function: Callable[..., Any], *args: torch.Tensor) -> None:
    """Assert what eager gives in the same precision, infinities and NaN included."""
    torch.testing.assert_close(onnx(function)(*args), function(*args), equal_nan=True)


# Between real and complex


def test_made_of_real_numbers() -> None:
    agrees(lambda a, b: (torch.complex(a, b), torch.polar(a, b)), (torch.randn(3, 1), torch.randn(4)))
    agrees(lambda x: torch.view_as_complex(x + 1), (torch.randn(3, 4, 2),))


def test_taken_apart() -> None:
    agrees(lambda x: (x.real + 1, x.imag + 1, torch.view_as_real(x) * 2, x.abs(), x.angle()), (z(3, 4),))


def test_conjugates() -> None:
    agrees(lambda x: (x.conj() * 2, x.conj().imag + 1, x.mH + 0, x.conj_physical()), (z(3, 4),))


def test_casts() -> None:
    agrees(lambda x: (x.cfloat(), x.cdouble()), (torch.randn(3),), (torch.arange(3),), (torch.tensor([True, False]),))
    agrees(lambda x: (x.to(torch.complex128), x.bool(), (x.real * 9).long()), (z(3, 4),))
    agrees(lambda x: x.bool(), (torch.tensor([0j, 1j, 1 + 0j]),))


def test_a_view_as_real_is_real() -> None:
    agrees(lambda x: torch.view_as_real(x).sum(-1).tanh(), (z(3, 4),))


def test_equal_constants_are_not_mixed_up() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x + torch.tensor([1.0, 2.0]), y + torch.tensor(1 + 2j), y.real * torch.tensor([1.0, 2.0])

    agrees(function, (torch.randn(3, 2), z(3, 2)))


# What enters and leaves


@pytest.mark.parametrize(
    "given",
    [z(3, 4).conj(), z(3, 4).t(), z(6, 8)[::2, ::2], z(3, 4).t().conj(), z(), z(0, 4), z(3, 4, dtype=torch.complex128)],
    ids=["conjugated", "transposed", "with gaps", "adjoint", "0-d", "empty", "double"],
)
def test_inputs(given: torch.Tensor) -> None:
    agrees(lambda x: (x * 2j, x.abs(), x.sum()), (given,))


@pytest.mark.parametrize("given", [z(1).conj().imag, torch._neg_view(torch.randn(4))], ids=["part", "whole"])
def test_an_input_whose_memory_has_the_other_sign(given: torch.Tensor) -> None:
    assert given.is_neg()
    agrees(lambda x: x * 2, (given,))


def test_a_result_has_the_strides_of_torch() -> None:
    given = z(3, 4)
    result = onnx(lambda x: (x * 2).t())(given)
    assert result.stride() == (given * 2).t().stride()
    torch.testing.assert_close(result, (given * 2).t())


def test_edited_weights_are_noticed() -> None:
    class Turn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("by", z(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.by

    turn, x = Turn(), z(3, 4)
    compiled = onnx(turn)
    torch.testing.assert_close(compiled(x), x * turn.by)
    turn.by.mul_(1j)
    torch.testing.assert_close(compiled(x), x * turn.by)


def test_an_operator_without_a_complex_translation_is_refused() -> None:
    with pytest.raises(Exception, match="no translation for complex tensors") as refused:
        onnx(lambda x: (x * 2).tanh())(z(3))
    assert UnsupportedOperator.__name__ in repr(refused.value)


def test_half_precision_is_refused() -> None:
    with pytest.raises(Exception, match=r"ONNX has no tensors of dtype torch\.complex32"):
        onnx(lambda x: x.to(torch.complex32))(torch.randn(3))


def test_complex_tensors_pass_between_onnx_and_torch() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.conj() * 2).tanh() * x

    compiled = torch.compile(function, backend="sardonyx", fullgraph=True, options={"fallback": "quiet"})
    given = z(3, 4)
    torch.testing.assert_close(compiled(given), function(given))


def test_another_engine() -> None:
    def function(x: torch.Tensor) -> Any:
        return x * 2j, torch.fft.rfft(x.real)

    compiled = torch.compile(function, backend="sardonyx", options={"fallback": "error", "engine": "reference"})
    given = z(3, 4)
    torch.testing.assert_close(compiled(given), function(given))


# Arithmetic


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, r: (x + y, x - y, x + r, r - x, x + 1, 2j - x),
        lambda x, y, r: (torch.add(x, y, alpha=2), torch.sub(x, y, alpha=1 - 2j), torch.add(r, y, alpha=3)),
        lambda x, y, r: (x * y, x * r, r * x, x * 2, r * 2j),
        lambda x, y, r: (x / y, x / r, r / x, x / 2, 1 / x, r / 2j, x.reciprocal()),
        lambda x, y, r: (-x, x.exp(), x.sgn(), x * x.conj(), x.square(), x**2, x**3),
        lambda x, y, r: (x == y, x == x, x != y, r == x, r == 2j, x.isnan(), x.isinf(), x.isfinite()),
        lambda x, y, r: (torch.where(r > 0, x, y[0]), torch.where(r > 0, x, 0), x.masked_fill(r > 0, 1j)),
        lambda x, y, r: (x.index_fill(-1, torch.tensor([0, -1]), 2j), x.index_fill(0, torch.tensor(1), y[0, 0])),
    ],
    ids=["sums", "alpha", "products", "quotients", "functions", "comparisons", "choices", "filling"],
)
def test_elementwise(function: Callable[..., Any]) -> None:
    agrees(function, (z(3, 4), z(3, 4), torch.randn(3, 4)), (z(3, 1), z(3, 4), torch.randn(4)))


def test_large_and_small_numbers() -> None:
    size = torch.tensor([1e-30, 1e-20, 1.0, 1e20, 1e30])
    agrees_with_eager(lambda x: (x / x.flip(0), x.abs(), x.sgn()), size * torch.tensor(3 + 4j))


def test_infinities_and_nan() -> None:
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -1.0])
    values = torch.complex(*torch.meshgrid(odd, odd, indexing="ij")).flatten()
    agrees_with_eager(lambda x: (x * x[:, None], x / x[:, None], 1 / x, x * 2, x + 1j, x.exp(), x.sgn()), values)
    agrees_with_eager(lambda x: (x.abs(), x.angle(), x.isinf(), x.isnan(), x.bool(), x == x), values)


def test_sums() -> None:
    agrees(
        lambda x: (x.sum(), x.sum(0), x.sum((-1, 0), keepdim=True), x.mean(), x.mean(-1), x.cumsum(-1), x[0, 0].sum()),
        (z(3, 4),),
    )
    agrees(lambda x: x.sum(0, dtype=torch.complex64), (torch.randn(3, 4),))


def test_products_of_matrices() -> None:
    agrees(lambda x, y: (x @ y, x @ x.mH, x[0] @ y, y.mT @ x[1], x[0].dot(y[:, 0]), torch.vdot(x[0], x[1])), _two())
    agrees(lambda x, y: (x[None] @ y.expand(2, 4, 5), torch.einsum("ij,jk->ki", x, y), F.linear(x, x, x[:, 0])), _two())
    agrees(lambda x, y: torch.addmm(x[:, :1], x, y, beta=2j, alpha=0.5), _two())


def _two() -> tuple[torch.Tensor, torch.Tensor]:
    return z(3, 4), z(4, 5)


# Views, copies, constants


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.t(), x.permute(-1, 0), x.transpose(-1, 0), x[None].mT, x[0].t()),
        lambda x: (
            x.reshape(-1),
            x.view(2, 2, -1),
            x.flatten(),
            x[:, None].squeeze(-2),
            x[:1].squeeze(),
            x.unsqueeze(-1),
        ),
        lambda x: (x[:, 1:-1], x[:, -1], x[..., ::2], x[-1, 0], x.narrow(-1, 1, 2)),
        lambda x: (x[None].expand(2, -1, -1), x.repeat(2, 1), x.repeat(2, 1, 3)),
        lambda x: (torch.cat([x, x.real], -1), torch.cat([x, x[:0]]), torch.stack([x, x], -1), torch.stack([x, x])),
        lambda x: (*x.split(2, -1), *x.split([1, 3]), *x.unbind(-1)[:2], *x.chunk(2)),
        lambda x: (x.flip(-1), x.flip(0, 1), x.roll(1, -1), x.roll(5), x.roll((1, 2), (0, -1)), torch.fft.fftshift(x)),
        lambda x: (x[[1, 0]], x[:, [2, 0]], x[[1, 0], [2, 3]], x.index_select(-1, torch.tensor([3, 0]))),
        lambda x: (
            x.gather(-1, torch.tensor([[1], [0]])),
            F.pad(x, (1, 2)),
            F.pad(x, (-1, 0, 2, 1)),
            x.unfold(-1, 3, 1),
        ),
        lambda x: (torch.zeros_like(x), torch.full_like(x, 2j), torch.ones(3, dtype=Z), torch.full((2,), 1j, dtype=Z)),
    ],
    ids=["transposed", "shaped", "sliced", "repeated", "joined", "split", "turned", "indexed", "padded", "constant"],
)
def test_moved_about(function: Callable[..., Any]) -> None:
    agrees(lambda x: tree_map(lambda y: y * 2, function(x + 1)), (z(4, 6),))


# Fourier transforms


@pytest.mark.parametrize("size", [1, 2, 8, 9, 400, 513, 1021, 2048, 2063], ids=lambda n: f"of {n}")
def test_transforms(size: int) -> None:
    """Those that are matrices, those in two steps, and primes, which are left to the engine."""
    f = torch.fft
    agrees(
        lambda x, y: (f.fft(x), f.ifft(x), f.rfft(y), f.fft(y), f.ihfft(y)),
        (z(2, size), torch.randn(2, size)),
        rtol=2e-6,
    )
    agrees(lambda x: (f.irfft(x, n=2 * size - 1), f.irfft(x, n=2 * size), f.hfft(x, n=size)), (z(2, size),), rtol=2e-6)


@pytest.mark.parametrize("norm", ["forward", "backward", "ortho"])
def test_normalizations_over_several_axes(norm: str) -> None:
    f = torch.fft
    agrees(
        lambda x, y: (
            *(f.fftn(x, norm=norm), f.ifft2(x, norm=norm), f.rfftn(y, dim=(2, 0), norm=norm), f.irfft2(x, norm=norm)),
            *(f.irfftn(x, s=(4, 3), dim=(0, 1), norm=norm), f.hfftn(x, norm=norm), f.ihfft2(y, norm=norm)),
            *(f.fft(x, n=9, dim=0, norm=norm), f.rfft(y, n=3, dim=1, norm=norm)),
        ),
        (z(3, 6, 5), torch.randn(3, 6, 5)),
    )


def test_transforms_in_double_precision() -> None:
    given = (z(2, 60, dtype=torch.complex128), torch.randn(2, 1021, dtype=torch.float64))
    agrees(lambda x, y: (torch.fft.ifft(x), torch.fft.irfft(x), torch.fft.rfft(y)), given, rtol=1e-12)


def test_short_time_transforms() -> None:
    def spectrogram(x: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(16, dtype=x.dtype)
        return torch.stft(x, 16, hop_length=5, window=window, return_complex=True).abs().square()

    agrees(spectrogram, (torch.randn(2, 80),))


def test_gradients_through_a_transform() -> None:
    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * w, n=8).square().mean() + torch.fft.fft(x).abs().sum()

    def gradients(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, w = (t.clone().requires_grad_() for t in given)
        with torch.enable_grad():
            return torch.autograd.grad(function(x, w), (x, w))

    given = torch.randn(3, 8), z(5)
    torch.testing.assert_close(gradients(onnx(loss)), gradients(loss))


# Symbolic sizes


CALLS = [(z(3, 8),), (z(5, 12),), (z(4, 7),)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.fft(x, norm="ortho"),
        lambda x: torch.fft.ifft(x, dim=0),
        lambda x: torch.fft.rfft(x.real),
        lambda x: torch.fft.irfft(x),
        lambda x: torch.fft.irfft(x, n=9),
        lambda x: torch.fft.fft(x, n=16),
        lambda x: torch.fft.fftn(x),
    ],
    ids=["forward", "inverse", "of reals", "to reals", "to a known size", "of a known size", "both axes"],
)
def test_transforms_of_symbolic_sizes(function: Callable[..., Any]) -> None:
    agrees(function, *CALLS, dynamic=True)


def test_views_and_products_of_symbolic_sizes() -> None:
    agrees(
        lambda x: (x.t().reshape(-1) * 2, x[:, 1:] + 1, torch.cat([x, x.real], 1), x @ x.mH, x.flatten() * x.view(-1)),
        *CALLS,
        dynamic=True,
    )
    agrees(lambda x: (x * x.shape[0], x.sum(0), x.mean(), x[-1].exp(), torch.zeros_like(x) + 1j), *CALLS, dynamic=True)


# The table


def _target(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def test_a_complex_translation_takes_the_arguments_of_its_operator() -> None:
    table.names()
    for name in complex_as_real.names():
        arguments = _target(name)._schema.arguments
        positional = [a.name for a in arguments if not a.kwarg_only]
        translation = complex_as_real.find(_target(name))
        assert translation is not None
        inspect.signature(translation).bind("g", *positional, **{a.name: None for a in arguments if a.kwarg_only})
