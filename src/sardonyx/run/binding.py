"""How a call is bound to a model: which argument each input is, and how each result is made of the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sardonyx.capture.regions import Region, Result
from sardonyx.run.drawing import Drawer, drawer
from sardonyx.run.layout import strides_of_results, with_strides
from sardonyx.sizes import SizesOfCall
from sardonyx.translate.translator import Translation


@dataclass(frozen=True, eq=False)
class Binding:
    """Which argument each input of a model is, and how outputs become results."""

    inputs: tuple[int, ...]
    results: tuple[Result, ...]
    weights: Mapping[str, int] = field(default_factory=dict)
    """For each initializer whose data is torch's the argument that it is."""
    fixed: frozenset[int] = frozenset()
    """Arguments that are parameters or buffers: the same tensors on nearly every call."""
    complex: frozenset[int] = frozenset()
    """Arguments that are complex: the engine is given their parts, as pairs."""
    draws: tuple[Drawer, ...] = ()
    """The random numbers that the inputs after those are."""
    reshaped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Outputs that are to be seen with other sizes than the engine gives them."""
    strides: Sequence[SizesOfCall | None] = ()
    """For each result how to compute the strides to restore, where any have to be."""

    @classmethod
    def of(cls, region: Region, translation: Translation) -> Binding:
        """That of a region's translation."""
        vals = [node.meta.get("val") for node in region.graph.graph.find_nodes(op="placeholder")]
        return cls(
            inputs=tuple(translation.inputs),
            results=region.results,
            weights=translation.weights,
            fixed=region.weights,
            complex=frozenset(i for i, x in enumerate(vals) if isinstance(x, torch.Tensor) and x.dtype.is_complex),
            draws=tuple(drawer(draw, region.graph, region.device) for draw in translation.random_inputs),
            strides=strides_of_results(region.results, region.graph),
        )

    @cached_property
    def _pairs(self) -> tuple[int, ...]:
        """Which of the inputs are complex."""
        return tuple(i for i, argument in enumerate(self.inputs) if argument in self.complex)

    @cached_property
    def _as_they_are(self) -> bool:
        """Whether the first outputs are the results as they are."""
        return all(result == Result(i) for i, result in enumerate(self.results))

    @property
    def is_plain(self) -> bool:
        """Whether inputs are arguments as they are, and each result is None or an output, none twice."""
        taken = [result.output for result in self.results if result.output is not None]
        plain = all(result == Result(result.output) for result in self.results)
        return plain and not (self.draws or self._pairs) and len(set(taken)) == len(taken)

    def feeds(self, args: Sequence[Any]) -> list[Any]:
        """The engine's inputs for the arguments of a call; random ones are drawn."""
        feeds = [args[i] for i in self.inputs]
        for i in self._pairs:
            feeds[i] = torch.view_as_real(feeds[i].resolve_conj())
        if self.draws:
            feeds += [draw(args) for draw in self.draws]
        return feeds

    def restore(self, outputs: list[torch.Tensor], args: Sequence[Any] = ()) -> Sequence[Any]:
        """The results of a call, from the engine's outputs and the arguments that are handed back."""
        for index, shape in self.reshaped.items():
            outputs[index] = _reshaped(outputs[index], shape)
        if self._as_they_are:
            return outputs[: len(self.results)]
        strides = self.strides or (None,) * len(self.results)
        return [restored(result, outputs, args, sizes) for result, sizes in zip(self.results, strides, strict=True)]


def restored(
    result: Result, outputs: Sequence[torch.Tensor], args: Sequence[Any] = (), strides: SizesOfCall | None = None
) -> Any:
    """One result of a call."""
    if result.passed is not None:
        return args[result.passed]
    if result.output is None:
        return result.constant
    value = outputs[result.output]
    if result.number:
        return value.item()
    if result.complex:
        value = torch.view_as_complex(value)
    if result.order is not None:
        value = value.permute([result.order.index(axis) for axis in range(value.dim())])
    return value if strides is None else with_strides(value, strides(args))


def _reshaped(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The same memory with other sizes, and no view: what a graph returns may be edited in place."""
    seen = x.view(shape)
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(x.untyped_storage(), seen.storage_offset(), shape, seen.stride())
