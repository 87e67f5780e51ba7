"""Places given by strides, by masks of fewer dimensions, and in tensors of none."""

from __future__ import annotations

import pytest
import torch

from .agreement import agrees, onnx

MASK = torch.tensor([[True, False, True], [False, False, True]])


def test_strides_are_followed() -> None:
    agrees(lambda x: torch.as_strided_copy(x, (2, 3), (1, 4), 2), torch.randn(4, 5))
    agrees(lambda x: torch.as_strided_copy(x, (3, 3), (1, 1)), torch.arange(6))
    agrees(lambda x, y: torch.as_strided_scatter(x, y, (2, 3), (1, 4), 2), torch.randn(4, 5), torch.randn(2, 3))


def test_strides_into_other_memory_stay_in_torch() -> None:
    with pytest.raises(Exception, match="strides that reach beyond the tensor"):
        onnx(lambda x: torch.as_strided_copy(x, (2, 3), (1, 4), 2))(torch.randn(4, 5)[:, 1:3])


def test_strides_into_transposed_memory() -> None:
    agrees(lambda x: torch.as_strided_copy(x, (2, 3), (1, 4), 2), torch.randn(4, 5).T)


@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (1, 4), (4,), (1,), ()])
def test_rows_are_assigned_under_a_mask(shape: tuple[int, ...]) -> None:
    agrees(lambda x, v: torch.ops.aten.index_put(x, [MASK], v), torch.randn(2, 3, 4), torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 4), (4,), ()])
def test_rows_are_added_under_a_mask(shape: tuple[int, ...]) -> None:
    agrees(lambda x, v: torch.ops.aten.index_put(x, [MASK], v, True), torch.randn(2, 3, 4), torch.randn(shape))


def test_nothing_is_assigned_where_nothing_is_marked() -> None:
    nowhere = torch.zeros(2, 3, dtype=torch.bool)
    agrees(lambda x, v: torch.ops.aten.index_put(x, [nowhere], v), torch.randn(2, 3, 4), torch.randn(0, 4))


@pytest.mark.parametrize("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_reducing_into_a_tensor_without_dimensions(reduce: str, include_self: bool) -> None:
    index = torch.tensor([0])
    x, source = torch.tensor(3.0), torch.tensor(2.0)
    agrees(lambda x, s: x.index_reduce(0, index, s, reduce, include_self=include_self), x, source)


def test_places_of_triangles() -> None:
    agrees(lambda x: (x + torch.tril_indices(3, 4, 1).sum(), torch.triu_indices(4, 3, -1)), torch.tensor(1))
