"""Views share memory, writes go where they are meant to, gradients flow; sizes at the edge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx.eager.dispatch import State
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
    with pytest.raises(RuntimeError, match=r"aten::add.out: the result has shape \(3, 4\)"):
        torch.add(X.to("ort"), 1, out=target)
    assert target.tolist() == [1] * 5
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(X.to("ort"), 0.5, out=torch.empty(3, 4, dtype=torch.int64, device="ort"))


def test_out_on_another_device_is_an_error() -> None:
    for x in (torch.ones(3, device="ort"), torch.tensor(1.0, device="ort")):
        for _ in range(3):
            torch.add(x, x, out=torch.empty_like(x))
            with pytest.raises(RuntimeError, match=r"aten::add.out: the result is on ort:0 and .* on cpu"):
                torch.add(x, x, out=torch.empty(x.shape))


def test_a_copy_over_its_own_source_is_refused_as_on_the_cpu() -> None:
    for x in (X.clone(), X.to("ort")):
        for flat in (x.view(-1), x.t().reshape(-1)):
            with pytest.raises(RuntimeError, match="refer to a single memory location"):
                flat[1:].copy_(flat[:-1])
        x[0].copy_(x[0])
        x[:, 1].copy_(x[:, 2])
    torch.testing.assert_close(X.to("ort")[:, 1].copy_(X.to("ort")[:, 2]).cpu(), X[:, 2])


def test_a_tensor_that_is_resized_keeps_what_others_see() -> None:
    x = torch.arange(4.0, device="ort")
    part = x[:2]
    x.resize_(2)
    part.fill_(7)
    assert x.tolist() == [7, 7]
    assert x.resize_(4).tolist() == [7, 7, 2, 3]
    if State.core is None:
        with pytest.raises(RuntimeError, match="the memory is shared"):
            x.resize_(9)
    else:
        x.resize_(9)
        part.fill_(5)
        assert x[:4].tolist() == [5, 5, 2, 3]
    assert torch.arange(2.0, device="ort").resize_(3)[:2].tolist() == [0, 1]


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


def test_zeros_of_either_sign_are_two_numbers() -> None:
    x = torch.ones(2)
    moved = x.to("ort")
    for number in (0.0, -0.0, 0.0, -0.0):
        for function in (torch.div, torch.copysign, lambda a, b: torch.full((2,), b, device=a.device).reciprocal()):
            torch.testing.assert_close(function(moved, number).cpu(), function(x, number))


def test_a_number_that_is_none_makes_one_model() -> None:
    x = X.to("ort")
    assert x.masked_fill(x > 3, float("nan")).isnan().sum().item() == 8
    before = len(PLANS)
    for _ in range(5):
        x.masked_fill(x > 3, float("nan"))
    assert len(PLANS) == before


def test_the_default_dtype_is_that_of_the_time() -> None:
    whole = torch.arange(1, 4, device="ort")
    calls = (lambda: whole / 2, lambda: whole.sqrt(), lambda: torch.ones(2, device="ort"))
    try:
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert {call().dtype for call in calls} == {dtype}
    finally:
        torch.set_default_dtype(torch.float32)


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


@pytest.mark.parametrize("masks", [(), ("src_mask",), ("src_key_padding_mask",), ("src_mask", "src_key_padding_mask")])
@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "activation": "gelu"}])
def test_layers_that_are_whole_without_gradients(masks: tuple[str, ...], settings: dict[str, Any]) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **settings).eval()
    moved, x = copy.deepcopy(layer).to("ort"), torch.randn(2, 3, 8)
    known = {
        "src_mask": torch.ones(3, 3, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.tensor([[False, False, True], [False, False, False]]),
    }
    given = {name: known[name] for name in masks}
    with torch.no_grad():
        found = moved(x.to("ort"), **{name: mask.to("ort") for name, mask in given.items()})
        torch.testing.assert_close(found.cpu(), layer(x, **given))


def test_attention_shows_its_weights_where_asked() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    moved, x = copy.deepcopy(layer).to("ort"), torch.randn(2, 3, 8)
    y = x.to("ort")
    with torch.no_grad():
        for settings in ({}, {"average_attn_weights": False}):
            for one, other in zip(moved(y, y, y, **settings), layer(x, x, x, **settings), strict=True):
                torch.testing.assert_close(one.cpu(), other)
        assert moved(y, y, y, need_weights=False)[1] is None


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


@pytest.mark.parametrize("strides", [(1, 4), (4, 1), (1, 1), (0, 1), (2, 0)])
def test_a_copy_lies_as_the_cpus_does(strides: tuple[int, int]) -> None:
    x = torch.arange(20.0)
    copied, expected = (y.as_strided((3, 4), strides).clone() for y in (x.to("ort"), x))
    assert copied.stride() == expected.stride()
    torch.testing.assert_close(copied.resize_(5).cpu(), expected.resize_(5))


def test_the_smallest_whole_number_is_divided() -> None:
    """By −1, where the processor has no answer, and torch's CPU none for a process that goes on."""
    x, y = torch.tensor([-(2**63), 7, -7, 7]), torch.tensor([-1, -1, 2, -2])
    moved, by = x.to("ort"), y.to("ort")
    assert (moved // by).tolist() == [-(2**63), -7, -4, -4]
    assert (moved % by).tolist() == [0, 0, 1, -1]
    assert torch.div(moved, by, rounding_mode="trunc").tolist() == [-(2**63), -7, -3, -3]
    with pytest.raises(RuntimeError, match="floor_divide"):
        moved // torch.zeros_like(by)


def test_numbers_are_cast_as_tensors_are() -> None:
    for number in (-2.5, 300.0):
        x = torch.tensor(number, dtype=torch.float64)
        torch.testing.assert_close(x.to("ort").to(torch.uint8).cpu(), x.to(torch.uint8))
