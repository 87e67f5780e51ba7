"""Random inputs of a graph, sampled from torch's random generator, so that `torch.manual_seed` applies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from sardonyx.sizes import sizes_of_call
from sardonyx.translate.random_inputs import RandomInput

RandomSampler: TypeAlias = Callable[[Sequence[Any]], torch.Tensor]
"""Samples one random input of a graph, given the arguments of the call."""

_GENERATORS: dict[str, Callable[..., torch.Tensor]] = {"uniform": torch.rand, "normal": torch.randn}


def random_sampler(draw: RandomInput, graph: torch.fx.GraphModule, device: torch.device) -> RandomSampler:
    """Return the sampler of a random input of `graph` on `device`; symbolic sizes are read from the arguments."""
    generate = _GENERATORS[draw.distribution]
    if all(isinstance(dim, int) for dim in draw.dims):
        return lambda args: generate(draw.dims, dtype=draw.dtype, device=device)
    sizes = sizes_of_call(draw.dims, graph)

    def sample(args: Sequence[Any]) -> torch.Tensor:
        return generate(sizes(args), dtype=draw.dtype, device=device)

    return sample


@contextmanager
def fixed_seed() -> Iterator[None]:
    """While active, sample the same numbers each time; the caller's random generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
