"""Results have torch's strides, whatever of their sizes is dynamic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sardonyx.run.layout import with_strides


def views(x: Tensor) -> tuple[Tensor, ...]:
    y, z = x + 1, x.unsqueeze(0) * x.unsqueeze(1)
    slices = (y[:, ::2], y[1:, 1:], y[:, 1], y.t()[1:], *y.chunk(2, 1), y[:2, :2].diagonal())
    expanded = (y.unsqueeze(0).expand(3, *y.shape), y.sum(1, keepdim=True).expand(-1, x.shape[1]))
    return *slices, *expanded, y.t(), z.permute(2, 0, 1), z.permute(1, 2, 0)[:, 1:], y.unfold(1, 2, 1), y * 2


def strides(tensors: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(tuple(x.shape), x.stride()) for x in tensors]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_views_of_dynamic_sizes_have_torchs_strides(training: bool) -> None:
    run = torch.compile(views, backend="sardonyx", dynamic=True, options={"fallback": "error"})
    with torch.set_grad_enabled(training):
        for shape in ((4, 6), (6, 4), (3, 8)):
            x = torch.randn(shape, requires_grad=training)
            results, expected = run(x), views(x)
            assert strides(results) == strides(expected)
            for got, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(got, wanted)
            if training:
                grads = [torch.autograd.grad(sum((y * y).sum() for y in made), x)[0] for made in (results, expected)]
                torch.testing.assert_close(*grads)
                assert grads[0].stride() == grads[1].stride()


def test_strides_by_a_size_of_which_arguments_have_only_powers() -> None:
    def squared(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y.reshape(*reversed(y.shape))  # so that the size of x is the square of one of y
        products = torch.outer(x.flatten(), x.flatten())
        column, totals = (products * 2)[:, :1], products.sum(1)
        return column, totals, totals.tensor_split(2, -1)[1]

    run = torch.compile(squared, backend="sardonyx", dynamic=True)
    x, y = torch.randn(4, 4), torch.randn(4, 2, 2, 2)
    assert strides(run(x, y)) == strides(squared(x, y))


def test_axes_of_one_element_have_torchs_strides() -> None:
    run = torch.compile(views, backend="sardonyx", options={"fallback": "error"})
    x = torch.randn(2, 6)[:1]
    assert strides(run(x)[2:5]) == strides(views(x)[2:5])


def test_strides_that_move_no_element_copy_nothing() -> None:
    x = torch.randn(1, 4)
    assert with_strides(x, (1, 1)).data_ptr() == x.data_ptr()
    assert with_strides(x, (4, 1)) is x
    assert with_strides(torch.empty(0, 4), (7, 1)).stride() == (7, 1)
    assert torch.equal(with_strides(x, (4, 2)), x)


def shared(x: Tensor) -> tuple[Tensor, ...]:
    y, z = x * 2, x + 3
    return y, y.reshape(-1), z.t(), z[:, z.shape[1] // 2 :]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_that_share_memory_see_edits_of_each_other(dynamic: bool) -> None:
    run = torch.compile(shared, backend="sardonyx", dynamic=dynamic, options={"fallback": "error"})
    x = torch.randn(3, 4)
    for y, flat, turned, last in (shared(x), run(x)):
        flat.fill_(1)
        last.zero_()
        assert y.eq(1).all()
        assert turned[2:].eq(0).all()
        assert turned[:2].ne(0).any()


def test_a_view_of_an_edited_input_is_a_view_of_it() -> None:
    def edit(x: Tensor) -> Tensor:
        last = x.tensor_split(2, -1)[1]
        return last.masked_fill_(last > 0, 1)

    run = torch.compile(edit, backend="sardonyx", dynamic=True, options={"fallback": "error"})
    x = torch.randn(5, 6)
    expected = x.clone()
    edit(expected)
    result = run(x)
    assert torch.equal(x, expected)
    assert torch.equal(result, x[:, 3:])
    assert result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def by_element(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    logical = torch.logical_and(x[:1], y), torch.logical_or(x.sum(), y), torch.logical_xor(x[0], y).float()
    quotients = x // y, y // x.sum(), torch.div(x, y.amax(), rounding_mode="trunc"), torch.copysign(x, y.sum())
    logs = torch.xlogy(x, y), torch.xlogy(y, x), torch.special.xlog1py(x, y), torch.logaddexp(x[:, :1], y)
    return (
        *logical,
        *quotients,
        *logs,
        torch.logaddexp2(x[:, :1], y),
        torch.heaviside(x[:1], y),
        logical[0].permute(2, 0, 1),
    )


def normalized(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    size = x.shape[1]
    return (
        F.logsigmoid(x) * 2,
        1.5**x,
        torch.isin(x, y[0, 0]),
        torch.isin(x, 0.5, invert=True),
        F.batch_norm(x, torch.zeros(size), torch.ones(size)),
        F.batch_norm(y, None, None, training=True),
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("function", [by_element, normalized])
def test_operators_over_permuted_operands_have_the_strides_of_eagers_kernels(function: Any, dynamic: bool) -> None:
    run = torch.compile(function, backend="sardonyx", dynamic=dynamic, options={"fallback": "error"})
    turned, plain = torch.rand(3, 4, 5).permute(2, 1, 0), torch.rand(5, 4, 3)
    for x, y in ((turned, plain), (torch.rand(4, 5, 3).transpose(0, 1), turned)):
        results, expected = run(x, y), function(x, y)
        assert strides(results) == strides(expected)
        torch.testing.assert_close(results, expected)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.clamp(max=1), F.gelu, F.elu, F.hardtanh, F.hardswish, F.hardsigmoid],
    ids=["clamp", "gelu", "elu", "hardtanh", "hardswish", "hardsigmoid"],
)
def test_the_memory_format_that_follows_from_axes_of_one_element_is_eagers(function: Any) -> None:
    """Pooling takes channels last from strides that torch's fake kernels and its real ones give differently."""

    def pooled(x: Tensor) -> Tensor:
        return F.adaptive_avg_pool1d(function(x).t().reshape(1, -1, x.shape[0]), 2)

    x = torch.rand(2, 2).t()[1:]
    run = torch.compile(pooled, backend="sardonyx", options={"fallback": "error"})
    assert run(x).stride() == pooled(x).stride()


def test_gradients_flow_through_results_of_other_strides_than_traced() -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (torch.xlogy(x, y) * F.logsigmoid(x) + F.batch_norm(x, None, None, training=True)).sum(0)

    x, y = torch.rand(3, 4, 5).permute(2, 1, 0).requires_grad_(), torch.rand(5, 4, 3) + 1
    run = torch.compile(loss, backend="sardonyx", options={"fallback": "error"})
    with torch.enable_grad():
        grads = [torch.autograd.grad((f(x, y) ** 2).sum(), x)[0] for f in (run, loss)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("function", [F.selu, lambda x: torch.complex(x, x * x), lambda x: (x + 1).mT])
def test_results_may_be_modified_in_place_and_differentiated(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Autograd forbids it for views that a compiled function returns."""
    torch._dynamo.reset()
    x = torch.randn(3, 4, 5).permute(2, 1, 0).requires_grad_()
    with torch.enable_grad():
        result, expected = torch.compile(function, backend="sardonyx")(x), function(x)
        assert result.stride() == expected.stride()
        gradients = [torch.autograd.grad(y.mul_(2).abs().sum(), x)[0] for y in (result, expected)]
    torch.testing.assert_close(*gradients)
