"""Runs a dynamic model at the edges of its sizes: each at zero, one and large, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sardonyx.errors import SardonyxError

EDGES = (0, 1)
LARGE = 33


def edges_of(example: Mapping[str, int], edges: tuple[int, ...] = (*EDGES, LARGE)) -> Iterator[dict[str, int]]:
    """The example's sizes, then each alone at every edge, then all at the same."""
    yield dict(example)
    for name in example:
        yield from ({**example, name: edge} for edge in edges)
    if len(example) > 1:
        yield from (dict.fromkeys(example, edge) for edge in edges)


def agrees_at_the_edges(
    run: Callable[..., Any],
    model: Callable[..., Any],
    make: Callable[..., tuple[Any, ...]],
    example: Mapping[str, int],
    *,
    edges: tuple[int, ...] = (*EDGES, LARGE),
    tolerance: float = 1e-4,
) -> None:
    """Assert that `run` gives the model's shapes, dtypes and values at the edges, and raises where the model does."""
    for sizes in edges_of(example, edges):
        args = make(**sizes)
        try:
            expected = model(*args)
        except Exception as error:
            if "is ambiguous" in str(error):  # a size of -1 beside one of zero, which a graph has resolved
                assert not any(tensor.numel() for tensor in _tensors(run(*args)))
                continue
            with pytest.raises((SardonyxError, RuntimeError, IndexError)):  # the engine's error, or torch's
                run(*args)
            continue
        _assert_same(run(*args), expected, sizes, tolerance)


def _assert_same(result: Any, expected: Any, sizes: Mapping[str, int], tolerance: float) -> None:
    pairs = zip(_tensors(result), _tensors(expected), strict=True)
    for got, wanted in pairs:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), sizes
        torch.testing.assert_close(
            got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{sizes}: {m}"
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
