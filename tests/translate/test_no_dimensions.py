"""Operators that index, scatter, order and join, over tensors without dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from .agreement import agrees

PLACE, SOURCE = torch.tensor(0), torch.tensor(7.0)


def test_choosing_by_a_mask() -> None:
    def chosen(x: Tensor, mask: Tensor, source: Tensor) -> list[Tensor]:
        several = [x.masked_scatter(mask, values) for values in (source, source[0])]
        wide = torch.stack([mask, ~mask])
        return [*several, x.masked_scatter(wide, source), x.masked_fill(mask, 3.0), x.masked_fill(mask, source[1])]

    source = torch.tensor([1.0, 2.0, 3.0])
    for mask in (torch.tensor(True), torch.tensor(False)):
        agrees(chosen, torch.tensor(2.5), mask, source)


def test_scattering() -> None:
    def scattered(x: Tensor, index: Tensor, source: Tensor) -> list[Tensor]:
        reduced = [x.scatter_reduce(0, index, source, how) for how in ("sum", "prod", "mean", "amax")]
        single = [x.scatter(0, index, source), x.scatter(0, index, 4.0), x.scatter_add(0, index, source)]
        return [*single, *reduced, x.index_add(0, index, source), x.index_copy(0, index, source), x.put(index, source)]

    agrees(scattered, torch.tensor(2.5), PLACE, SOURCE)


def test_gathering() -> None:
    def gathered(x: Tensor, index: Tensor) -> list[Tensor]:
        return [x.gather(0, index), x.gather(-1, index[None]), x.take(index), x.index_select(0, index), x[None, ...]]

    agrees(gathered, torch.tensor(2.5), PLACE)


def test_ordering_and_joining() -> None:
    def ordered(x: Tensor) -> list[Tensor]:
        sums = [x.cumsum(0), x.cumprod(-1), x.logcumsumexp(0), *x.cummax(0)]
        return [*sums, *x.sort(), *x.topk(1), *x.median(0), x.argsort(), x.flip(()), x.roll(1), torch.hstack([x, x])]

    agrees(ordered, torch.tensor(2.5))
