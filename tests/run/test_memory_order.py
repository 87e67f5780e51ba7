"""Inputs that are permutations of dense memory are given to the engine in memory order, without a copy."""

from __future__ import annotations

import torch

from sardonyx.capture.regions import Result
from sardonyx.run.binding import Binding

ORDER = (0, 2, 3, 1)


def binding(*, fixed: frozenset[int] = frozenset()) -> Binding:
    return Binding((0,), (Result(0),), fixed=fixed, orders={0: ORDER})


def channels_last(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def test_an_input_is_a_contiguous_view() -> None:
    x = channels_last(2, 3, 4, 5)
    (fed,) = binding().feeds([x])
    assert fed.is_contiguous()
    assert fed.data_ptr() == x.data_ptr()
    assert fed.shape == (2, 4, 5, 3)


def test_a_weight_is_the_same_tensor_at_each_call() -> None:
    bound, weight = binding(fixed=frozenset({0})), channels_last(2, 3, 4, 5)
    assert bound.feeds([weight])[0] is bound.feeds([weight])[0]


def test_a_weight_whose_memory_or_strides_change_is_viewed_anew() -> None:
    bound, weight = binding(fixed=frozenset({0})), channels_last(2, 3, 4, 5)
    bound.feeds([weight])
    for replacement in (channels_last(2, 3, 4, 5), torch.randn(2, 3, 4, 5)):
        weight.data = replacement
        (fed,) = bound.feeds([weight])
        assert torch.equal(fed, weight.permute(ORDER))
        assert fed.data_ptr() == weight.data_ptr()


def test_a_binding_with_permuted_inputs_is_not_plain() -> None:
    assert not binding().is_plain
    assert Binding((0,), (Result(0),)).is_plain
