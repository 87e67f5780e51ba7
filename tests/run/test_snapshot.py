"""A snapshot notices edits of the tensors it was taken of."""

from __future__ import annotations

import pytest
import torch

from sardonyx.run.snapshot import NumberSnapshot, Snapshot


def test_nothing_changed() -> None:
    args = [torch.randn(3, 3), torch.randn(5)]
    snapshot = Snapshot([0, 1], args)
    assert snapshot.matches(args)
    assert snapshot.matches([args[0], args[1]])


@pytest.mark.parametrize("edit", [lambda w: w.add_(1), lambda w: w.data.mul_(2), lambda w: w.numpy().fill(3)])
@pytest.mark.parametrize("shape", [(3,), (100, 70), (2, 3, 4, 5)])
def test_an_edit_is_noticed(edit: object, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    snapshot = Snapshot([0], [weight])
    edit(weight)  # type: ignore[operator]
    assert not snapshot.matches([weight])


def test_another_tensor_is_noticed() -> None:
    weight = torch.ones(3)
    assert not Snapshot([0], [weight]).matches([weight.clone()])


def test_nan_equals_itself() -> None:
    weight = torch.full((4,), float("nan"))
    assert Snapshot([0], [weight]).matches([weight])


def test_empty_and_strided_tensors() -> None:
    args = [torch.empty(0, 3), torch.randn(4, 6).t()]
    assert Snapshot([0, 1], args).matches(args)


def test_numbers_tell_which_changed() -> None:
    args = [torch.tensor(1.5), torch.tensor(2.5)]
    numbers = NumberSnapshot([0, 1], args)
    assert numbers.changed(args) == []
    assert numbers.changed([torch.tensor(1.5), torch.tensor(9.0)]) == [1]
