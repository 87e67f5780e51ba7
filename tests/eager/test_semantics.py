"""Views share memory, writes go where they are meant to, gradients flow; sizes at the edge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sardonyx.eager.plans import PLANS

X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.view(4, 3),
        lambda x: x[1:],
        lambda x: x[:, ::2],
        lambda x: x[1],
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(1, 0),
        lambda x: x.unsqueeze(0),
        lambda x: x.reshape(2, 6),
        lambda x: x.as_strided((2, 2), (4, 1), 1),
        lambda x: x.unfold(1, 2, 2),
        lambda x: x.diagonal(),
        lambda x: x.select(1, 2),
        lambda x: x.split(2, 1)[1],
        lambda x: x.flatten(),
        lambda x: x.narrow(1, 1, 2),
        lambda x: x.movedim(0, 1),
        lambda x: x.view(torch.int32),
    ],
)
def test_a_view_shares_its_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, expected = X.to("ort"), X.clone()
    seen = view(x)
    assert seen._is_view() == view(expected)._is_view()
    assert seen.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    seen.mul_(3)
    view(expected).mul_(3)
    torch.testing.assert_close(x.cpu(), expected)
    torch.testing.assert_close(seen.cpu(), view(expected))


def test_an_expanded_tensor_is_read_as_it_seems() -> None:
    torch.testing.assert_close((X[:1].to("ort").expand(3, 4) + X.to("ort")).cpu(), X[:1] + X)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(1),
        lambda x: x.mul_(x),
        lambda x: x[1:].fill_(7),
        lambda x: x[0].copy_(x[1]),
        lambda x: x.t().add_(x.t().contiguous()),
        lambda x: x.__setitem__((0, 1), 5.0),
        lambda x: x.__setitem__(x > 4, 0.0),
        lambda x: x.__setitem__([0, 2], -1.0),
        lambda x: x.clamp_(2, 5),
        lambda x: x.zero_(),
        lambda x: x.scatter_(1, torch.zeros(3, 1, dtype=torch.int64, device=x.device), 9.0),
        lambda x: x.index_add_(0, torch.tensor([0, 0], device=x.device), x[1:].clone()),
        lambda x: x.masked_fill_(x < 3, 1.0),
        lambda x: x.addmm_(x[:, :3].clone(), x.clone(), beta=0.5),
        lambda x: x.sqrt_(),
        lambda x: x.transpose_(0, 1),
        lambda x: torch.add(x, 1, out=x),
    ],
)
def test_writing_in_place(write: Callable[[torch.Tensor], object]) -> None:
    x, expected = X.to("ort"), X.clone()
    write(x)
    write(expected)
    torch.testing.assert_close(x.cpu(), expected)


def test_out_is_written_where_it_lies() -> None:
    target = torch.empty(4, 3, device="ort")
    torch.add(X.to("ort"), 1, out=target.t())
    torch.testing.assert_close(target.cpu().t(), X + 1)
    empty = torch.empty(0, device="ort")
    assert torch.add(X.to("ort"), 1, out=empty) is empty
    torch.testing.assert_close(empty.cpu(), X + 1)
    double = torch.empty(3, 4, dtype=torch.float64, device="ort")
    torch.testing.assert_close(torch.add(X.to("ort"), 1, out=double).cpu(), X.double() + 1)


def test_out_of_another_shape_is_an_error() -> None:
    target = torch.ones(5, device="ort")
    with pytest.raises(RuntimeError, match=r"aten::add.out: the result has the shape \(3, 4\)"):
        torch.add(X.to("ort"), 1, out=target)
    assert target.tolist() == [1] * 5
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(X.to("ort"), 0.5, out=torch.empty(3, 4, dtype=torch.int64, device="ort"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 5],
        lambda x: torch.masked_select(x, x > 5),
        lambda x: (x // 3).unique(),
        lambda x: torch.where(x > 5),
        lambda x: x[x > 100],
        lambda x: (x > 100).nonzero(),
    ],
)
def test_sizes_that_depend_on_values(function: Callable[[torch.Tensor], object]) -> None:
    got, expected = function(X.to("ort")), function(X)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, expected)), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(a.cpu(), b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
def test_dtypes_that_onnxruntime_lacks_are_cast_around(dtype: torch.dtype) -> None:
    x = torch.arange(6).to(dtype)
    for function in (lambda a: a + a, lambda a: a * 2, lambda a: a.sum(), lambda a: a > 2, lambda a: torch.cat([a, a])):
        torch.testing.assert_close(function(x.to("ort")).cpu(), function(x))


@pytest.mark.parametrize(
    "function",
    [lambda x: x + 1, lambda x: x.sum(), lambda x: x.t(), lambda x: torch.cat([x, x]), lambda x: x @ x.t(), torch.relu],
)
def test_tensors_without_elements(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.zeros(0, 3)
    torch.testing.assert_close(function(x.to("ort")).cpu(), function(x))


def test_numbers_that_change_do_not_make_new_models_for_ever() -> None:
    x = X.to("ort")
    torch.testing.assert_close((x * 0.5).cpu(), X * 0.5)
    for number in torch.linspace(1, 2, 5).tolist():
        torch.testing.assert_close((x * number).cpu(), X * number)
    before = len(PLANS)
    for number in torch.linspace(3, 4, 20).tolist():
        torch.testing.assert_close((x * number).cpu(), X * number)
    assert len(PLANS) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x.flip(0),
        lambda x: x @ x.t(),
        lambda x: x.softmax(-1),
        lambda x: x.sum(0, keepdim=True) * x,
        lambda x: torch.cat([x, x], 1),
        lambda x: x.t().relu().sum(1),
        lambda x: nn.functional.layer_norm(x, (4,)),
    ],
)
def test_sizes_that_change_do_not_make_new_models_for_ever(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for length in range(2, 8):
        x = torch.randn(length, 4)
        torch.testing.assert_close(function(x.to("ort")).cpu(), function(x))
    before = len(PLANS)
    for length in (*range(8, 16), 9, 1, 0, 9):
        x = torch.randn(length, 4)
        for _ in range(2):
            torch.testing.assert_close(function(x.to("ort")).cpu(), function(x))
    assert len(PLANS) <= before + 4 * 2  # of a size of one and of none


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:1].expand(3, 4),
        lambda x: x[:, :1].expand(3, 4).t(),
        lambda x: x.unsqueeze(1).transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x[1:, 1:].t(),
        lambda x: x.as_strided((2, 2), (1, 1)),
        lambda x: x.unfold(1, 2, 1),
    ],
)
def test_operands_that_are_views(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    moved, x = view(X.to("ort")), view(X)
    for _ in range(3):
        for function in (torch.relu, lambda a: a + 1, lambda a: a + a, lambda a: a.sum(-1), lambda a: a @ a.mT):
            torch.testing.assert_close(function(moved).cpu(), function(x))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x[1:], lambda x: x[:, ::2]])
def test_writing_where_operands_lie(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def wrote(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            y = view(x)
            y.mul_(1.5).add_(y).sub_(y[0].clone())
            y.clamp_(-3, 30).sigmoid_()
            torch.add(y, y, out=y)
            torch.cumsum(y, 0, out=y)
        return x

    torch.testing.assert_close(wrote(X.to("ort").clone()).cpu(), wrote(X.clone()))


def test_a_call_writes_where_it_is_told_and_nowhere_else() -> None:
    one, other = torch.ones(4, 4, device="ort"), torch.full((4, 4), 2.0, device="ort")
    for _ in range(3):
        first = torch.empty(4, 4, device="ort")
        torch.mm(one, other, out=first)  # straight to it
        before = first.clone()
        torch.mm(other, other, out=other)  # not before it is read
        torch.testing.assert_close(first.cpu(), before.cpu())
        torch.testing.assert_close(other.cpu(), torch.full((4, 4), 16.0))
        other.fill_(2.0)


def test_writing_a_product_over_its_operand() -> None:
    x = torch.randn(4, 4)
    moved = x.to("ort")
    for _ in range(3):
        torch.mm(moved, moved, out=moved)
        expected = x @ x
        x = expected
        torch.testing.assert_close(moved.cpu(), expected)
        moved.div_(moved.abs().max())
        x = x / x.abs().max()


def test_complex_numbers() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j])
    for function in (lambda z: z * z, lambda z: z.conj() * 2, lambda z: torch.view_as_real(z.conj().resolve_conj())):
        torch.testing.assert_close(function(x.to("ort")).cpu(), function(x))


# Gradients


def test_gradients_through_writes_and_views() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0].mul_(3)
        return (y.t() ** 2).sum()

    with torch.enable_grad():
        x, expected = X.to("ort").requires_grad_(), X.clone().requires_grad_()
        loss(x).backward()
        loss(expected).backward()
    assert x.grad is not None
    assert x.grad.device.type == "ort"
    torch.testing.assert_close(x.grad.cpu(), expected.grad)


def test_a_second_derivative() -> None:
    with torch.enable_grad():
        x = torch.tensor(2.0, device="ort", requires_grad=True)
        (first,) = torch.autograd.grad(x**3, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
    assert second.item() == 12


def test_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    with torch.enable_grad():
        x = X.to("ort").requires_grad_()
        checkpoint(lambda t: t.sin().sum(), x, use_reentrant=False).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad.cpu(), X.cos())
