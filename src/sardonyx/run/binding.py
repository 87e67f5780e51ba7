"""Binding of a call to a model: which argument each input is, and how outputs become results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch

from sardonyx.capture.regions import Region, Result
from sardonyx.engines.engine import Runner
from sardonyx.precision.packing import Packing
from sardonyx.run.cache_binding import CacheBinding
from sardonyx.run.layout import over_memory, strides_of_results, with_strides
from sardonyx.run.random_inputs import RandomSampler, random_sampler
from sardonyx.sizes import SizesOfCall
from sardonyx.translate.translator import Translation


@dataclass(frozen=True, eq=False)
class Binding:
    """Which argument each input of a model is, and how outputs become results."""

    inputs: tuple[int, ...]
    results: tuple[Result, ...]
    weights: Mapping[str, int] = field(default_factory=dict)
    """Initializers whose data is in torch's memory: the argument of each."""
    widened: frozenset[str] = frozenset()
    """Those in half precision that the model has in float32."""
    packings: tuple[Packing, ...] = ()
    """Constants that are computed from weights, for layers in lower precision."""
    fixed: frozenset[int] = frozenset()
    """Arguments that are parameters or buffers: nearly always the same tensors."""
    complex: frozenset[int] = frozenset()
    """Complex arguments, which the engine gets as real tensors with a last axis of size 2."""
    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Arguments that the engine gets with their axes permuted: in the order in which they are in memory."""
    draws: tuple[RandomSampler, ...] = ()
    """Samplers of the random inputs, which follow those in `inputs`."""
    reshaped: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Outputs whose shape differs from the engine's, with the shape to restore."""
    cache: CacheBinding | None = None
    """Keys and values that the session appends to in place, if there are any."""
    strides: Sequence[SizesOfCall | None] = ()
    """For each result a function that computes the strides to restore; None if there are none."""

    @classmethod
    def of(cls, region: Region, translation: Translation) -> Binding:
        """Return the binding of a region's translation."""
        vals = [node.meta.get("val") for node in region.graph.graph.find_nodes(op="placeholder")]
        return cls(
            inputs=tuple(translation.inputs),
            results=region.results,
            weights=translation.weights,
            fixed=region.weights,
            complex=frozenset(i for i, x in enumerate(vals) if isinstance(x, torch.Tensor) and x.dtype.is_complex),
            draws=tuple(random_sampler(draw, region.graph, region.device) for draw in translation.random_inputs),
            strides=strides_of_results(region.results, region.graph),
        )

    @cached_property
    def _select(self) -> Callable[[Sequence[Any]], list[Any]]:
        """A function that returns the arguments which are inputs; a model has hundreds of weights."""
        if len(self.inputs) < 2:
            return lambda args: [args[i] for i in self.inputs]
        select = itemgetter(*self.inputs)
        return lambda args: list(select(args))

    @cached_property
    def _complex_inputs(self) -> tuple[int, ...]:
        """Indices of the complex inputs."""
        return tuple(i for i, argument in enumerate(self.inputs) if argument in self.complex)

    @cached_property
    def _permuted_inputs(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Indices of the inputs whose axes are permuted, and the order of each."""
        return tuple((i, self.orders[argument]) for i, argument in enumerate(self.inputs) if argument in self.orders)

    @cached_property
    def _weight_views(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The weight and its permuted view of earlier calls, by input: engines recognize a weight by its tensor."""
        return {}

    @cached_property
    def _outputs_are_results(self) -> bool:
        """Whether the first outputs are the results, unchanged."""
        return all(result == Result(i) for i, result in enumerate(self.results))

    def constants(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the data of initializers for the weights among these arguments."""
        constants = {name: self._widened(name, args[index]) for name, index in self.weights.items()}
        for packing in self.packings:
            constants |= packing.pack(args)
        return constants

    def _widened(self, name: str, weight: Any) -> Any:
        return weight.detach().float().contiguous() if name in self.widened else weight

    @property
    def constant_arguments(self) -> list[int]:
        """The arguments that are weights of a session."""
        packed = (argument for packing in self.packings for argument in packing.arguments)
        return sorted({*self.weights.values(), *packed})

    @property
    def is_plain(self) -> bool:
        """Whether inputs are unchanged arguments, and each result is None or an unchanged output, each used once."""
        outputs = [result.output for result in self.results if result.output is not None]
        plain = all(result == Result(result.output) for result in self.results)
        unchanged = not (self.draws or self._complex_inputs or self._permuted_inputs or self.cache)
        return plain and unchanged and len(set(outputs)) == len(outputs)

    def call(self, runner: Runner, args: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a call."""
        if self.cache is None:
            return self.restore(runner(self.feeds(args)), args)
        return self.restore(self.cache.run(runner, self._arguments_fed(args)), args)

    def feeds(self, args: Sequence[Any]) -> list[Any]:
        """Return the engine's inputs for the arguments of a call; samples the random inputs."""
        feeds = self._arguments_fed(args)
        if self.cache is not None:
            self.cache.claim(feeds)
        return feeds

    def _arguments_fed(self, args: Sequence[Any]) -> list[Any]:
        feeds = self._select(args)
        for i in self._complex_inputs:
            feeds[i] = torch.view_as_real(feeds[i].resolve_conj())
        for i, order in self._permuted_inputs:
            feeds[i] = self._permuted(i, feeds[i], order)
        if self.draws:
            feeds += [draw(args) for draw in self.draws]
        return feeds

    def _permuted(self, index: int, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        """Return a view of an input with its axes in this order; for a weight the same tensor at each call."""
        if self.inputs[index] not in self.fixed:
            return x.permute(order)
        weight, view = self._weight_views.get(index, (None, x))
        if weight is not x or view.data_ptr() != x.data_ptr() or view.stride() != tuple(x.stride(a) for a in order):
            view = x.detach().permute(order)
            self._weight_views[index] = (x, view)
        return view

    def restore(self, outputs: list[torch.Tensor], args: Sequence[Any] = ()) -> Sequence[Any]:
        """Return the results of a call, from the engine's outputs and from arguments that are returned unchanged."""
        for index, shape in self.reshaped.items():
            outputs[index] = over_memory(outputs[index], shape, outputs[index].view(shape).stride())
        if self._outputs_are_results:
            return outputs[: len(self.results)]
        strides = self.strides or (None,) * len(self.results)
        return [restore_result(r, outputs, args, s) for r, s in zip(self.results, strides, strict=True)]


def restore_result(
    result: Result, outputs: Sequence[torch.Tensor], args: Sequence[Any] = (), strides: SizesOfCall | None = None
) -> Any:
    """Return one result of a call."""
    if result.passed is not None:
        return args[result.passed]
    if result.output is None:
        return result.constant
    value = outputs[result.output]
    if result.number:
        return value.item()
    if result.complex:
        numbers = torch.view_as_complex(value)
        value = over_memory(numbers, numbers.shape, numbers.stride())
    if result.device is not None:
        value = value.to(result.device)
    if result.order is not None:
        permuted = value.permute([result.order.index(axis) for axis in range(value.dim())])
        value = over_memory(value, permuted.shape, permuted.stride())
    return value if strides is None else with_strides(value, strides(args))
