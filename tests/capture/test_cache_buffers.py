"""Buffers of keys and values: views are independent tensors, and rows are written once."""

from __future__ import annotations

import gc

import pytest
import torch

from sardonyx.capture import cache_buffers
from sardonyx.capture.arguments import Arguments
from sardonyx.capture.cache_buffers import BLOCK, CacheBuffer, buffer_for, buffer_of

ROWS = 5


def appended(past: torch.Tensor, value: float) -> tuple[CacheBuffer, torch.Tensor]:
    """Append a row as a session does: behind the past, in the buffer's memory."""
    buffer = buffer_for(past, 1)
    rows = past.shape[2]
    buffer.memory[:, :, rows] = value
    return buffer, buffer.view(rows + 1)


@pytest.fixture
def past() -> torch.Tensor:
    return torch.randn(2, 3, ROWS, 4)


def test_the_newest_view_is_continued_in_its_buffer(past: torch.Tensor) -> None:
    buffer, view = appended(past, 1.0)
    other, longer = appended(view, 2.0)
    assert other is buffer
    assert torch.equal(longer, torch.cat([past, torch.ones(2, 3, 1, 4), torch.full((2, 3, 1, 4), 2.0)], 2))


def test_an_older_view_is_copied(past: torch.Tensor) -> None:
    buffer, view = appended(past, 1.0)
    _, left = appended(view, 2.0)
    other, right = appended(view, 3.0)
    assert other is not buffer
    assert (left[:, :, -1] == 2).all()
    assert (right[:, :, -1] == 3).all()


def test_a_full_buffer_is_copied_to_one_with_another_block() -> None:
    buffer, view = appended(torch.randn(1, 1, BLOCK - 2, 1), 1.0)
    assert buffer.memory.shape[2] == BLOCK
    same, full = appended(view, 2.0)
    assert same is buffer
    other, _ = appended(full, 3.0)
    assert other is not buffer
    assert other.memory.shape[2] == 2 * BLOCK


def test_long_buffers_get_room_for_an_eighth() -> None:
    assert buffer_for(torch.zeros(1, 1, 64 * BLOCK, 1), 1).memory.shape[2] == 73 * BLOCK


@pytest.mark.parametrize("edit", [torch.Tensor.zero_, lambda x: x.numpy().fill(0), lambda x: x[:, :, :2].mul_(2)])
def test_an_edited_view_is_copied_and_others_do_not_see_the_edit(past: torch.Tensor, edit: object) -> None:
    assert callable(edit)
    buffer, view = appended(past, 1.0)
    _, longer = appended(view, 2.0)
    before = view.clone()
    edit(longer)
    assert torch.equal(view, before)
    assert not torch.equal(longer[:, :, :-1], before)
    other, _ = appended(longer, 3.0)
    assert other is not buffer


def test_a_view_that_became_another_tensor_is_copied(past: torch.Tensor) -> None:
    buffer, view = appended(past, 1.0)
    view.data = torch.randn(2, 3, ROWS + 1, 4)
    assert not buffer.claim(view, 1)


def test_parts_of_a_view_are_tensors_of_their_own(past: torch.Tensor) -> None:
    _, view = appended(past, 1.0)
    assert buffer_of(view) is not None
    assert buffer_of(view[:, :, :2]) is None
    assert buffer_of(view.clone()) is None


def test_a_buffer_is_freed_with_its_last_view(past: torch.Tensor) -> None:
    gc.collect()
    before = len(cache_buffers._buffers)
    buffer, view = appended(past, 1.0)
    _, longer = appended(view, 2.0)
    assert len(cache_buffers._buffers) == before + 2
    del buffer, view, longer
    assert len(cache_buffers._buffers) == before


def test_calls_with_views_have_the_key_of_contiguous_tensors(past: torch.Tensor) -> None:
    _, view = appended(past, 1.0)
    arguments, expected = Arguments.of([view]), Arguments.of([view.contiguous()])
    assert arguments.key == expected.key
    assert buffer_of(arguments.dense()[0]) is buffer_of(view)
    assert arguments.to_trace()[0].is_contiguous()
