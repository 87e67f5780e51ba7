"""One call of a module as a graph of its tensors, and for which other calls that graph stands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sardonyx.capture.arguments import Arguments, ResultBuilder, Results, contents_of_containers, copy_arguments
from sardonyx.capture.attributes import first_difference
from sardonyx.capture.conditions import SizeExpressions, environment_of, function_of_sizes
from sardonyx.capture.export import Captured, capture
from sardonyx.errors import CaptureError
from sardonyx.sizes import Dim, dim_of, dims_of

_MODULE_NAME = "module"


class FlatModule(torch.nn.Module):
    """A module that takes the tensors of a call one by one, and returns those that are new, one by one.

    What else the call has is held: it is part of the graph that is made of it.
    """

    results: Results
    symbolic: list[torch.SymInt]

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        given: Any,
        dynamic: Collection[int] = (),
        state: Callable[[], tuple[Any, ...]] = tuple,
    ) -> None:
        super().__init__()
        self._state = state
        self.add_module(_MODULE_NAME, module)
        arguments = Arguments.of(given)
        self._forward, self._given = forward, given
        self._integers, self._count, self._dynamic = arguments.integers, len(arguments.tensors), sorted(dynamic)
        self._gaps = arguments.gaps

    def forward(self, *flat: Any) -> tuple[torch.Tensor, ...]:
        """Call the module; `results` then tells how its results are put together."""
        tensors, integers = flat[: self._count], list(self._integers)
        for index, integer in zip(self._dynamic, flat[self._count :], strict=True):
            integers[index] = integer
        copy = copy_arguments(self._given, tensors, integers)
        before = contents_of_containers(copy)
        args, kwargs = copy.value
        state = self._state()
        result = self._forward(*args, **kwargs)
        self._refuse_change(state, self._state())
        self.symbolic = []
        self.results = Results(result, copy, before, tensors, self._gaps, self._size)
        return self.results.take()

    def _refuse_change(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        if before != after:
            changed = first_difference(before, after)
            raise CaptureError(f"forward changes the attribute {changed!r}, which a compiled module would not")

    def _size(self, size: torch.SymInt) -> ResultBuilder:
        index = len(self.symbolic)
        self.symbolic.append(size)
        return lambda call: call.sizes[index]


@dataclass(frozen=True)
class ModuleTrace:
    """A graph of a call."""

    graph: torch.fx.GraphModule
    weights: Mapping[int, str | torch.Tensor]
    """Placeholders that are weights, by their names in the module, or constants of its code."""
    inputs: Mapping[int, int]
    """Placeholders that a call gives: the place of each among the call's tensors and then its dynamic integers."""
    dynamic: tuple[int, ...]
    """Which of a call's integers are inputs."""
    results: Results
    accepts: Callable[[Sequence[int]], bool]
    """Whether the graph stands for calls of these sizes too."""
    condition: str
    """That, as a Python expression of `sizes`."""
    numbers: Callable[[Sequence[int]], Sequence[int]]
    """The integers that results have in them, from a call's sizes."""
    is_dynamic: bool
    has_numbers: bool = False

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.graph.graph.nodes)


def trace(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    given: Any,
    arguments: Arguments,
    varying: Collection[int],
    state: Callable[[], tuple[Any, ...]],
    preserved: Collection[str] = (),
) -> ModuleTrace:
    """Trace a call. `varying` are the places, in `Arguments.sizes`, of what is to stay a symbol where it can.

    `state` tells all that the module's attributes are. Torch.export takes back what a forward does to them, and would
    leave it out of the graph. Operators named in `preserved` stay as they are.
    """
    first = sum(tensor.dim() for tensor in arguments.tensors)
    dynamic = tuple(place - first for place in sorted(varying) if place >= first)
    flat = FlatModule(module, forward, given, dynamic, state)
    auto: Any = torch.export.Dim.AUTO
    specs: list[Any] = []
    at = 0
    for tensor in arguments.tensors:
        specs.append({axis: auto for axis, size in enumerate(tensor.shape) if at + axis in varying and size > 1})
        at += tensor.dim()
    inputs = (*arguments.dense(), *(arguments.integers[index] for index in dynamic))
    with torch.inference_mode(False):
        captured = capture(flat, inputs, {}, ((*specs, *(auto for _ in dynamic)),), preserved)
    _refuse_edits(captured)
    return _describe_trace(captured, flat, arguments, dynamic)


def _refuse_edits(captured: Captured) -> None:
    edited = "an argument in place" if captured.mutated else "a buffer" if captured.buffers else None
    if edited:
        raise CaptureError(
            f"forward edits {edited}, which a compiled module cannot",
            hint='fallback="warn" lets torch.compile(model, backend="sardonyx") do it, which can',
        )


def _describe_trace(
    captured: Captured, flat: FlatModule, arguments: Arguments, dynamic: tuple[int, ...]
) -> ModuleTrace:
    values = [node.meta.get("val") for node in captured.graph.graph.find_nodes(op="placeholder")]
    by_place = {place: values[index] for index, place in captured.inputs.items()}
    dims: list[Dim] = []
    for place, tensor in enumerate(arguments.tensors):
        value = by_place.get(place)
        dims += dims_of(value) if isinstance(value, torch.Tensor) else tensor.shape
    integers: list[Dim] = list(arguments.integers)
    for at, index in enumerate(dynamic):
        value = by_place.get(len(arguments.tensors) + at)
        integers[index] = dim_of(value) if isinstance(value, (int, torch.SymInt)) else integers[index]
    sizes = SizeExpressions([*dims, *integers], environment_of(values))
    weights = {index: _weight(flat, name, tensor) for index, (name, tensor) in captured.weights.items()}
    numbers = [dim_of(size) for size in flat.symbolic]
    return ModuleTrace(
        graph=captured.graph,
        weights=weights,
        inputs=captured.inputs,
        dynamic=dynamic,
        results=flat.results,
        accepts=_guard_function(sizes),
        condition=sizes.condition(),
        numbers=function_of_sizes(sizes.tuple_of(numbers)),
        is_dynamic=sizes.is_dynamic,
        has_numbers=bool(numbers),
    )


def _guard_function(sizes: SizeExpressions) -> Callable[[Sequence[int]], Any]:
    """Whether the trace stands for a call of other sizes."""
    try:
        return function_of_sizes(sizes.condition())
    except ValueError as error:
        raise CaptureError(f"the trace assumed more of sizes than integers can tell: {error}") from error


def _weight(flat: FlatModule, name: str, tensor: torch.Tensor) -> str | torch.Tensor:
    """The name of a tensor that the module holds; other tensors are constants of its code."""
    inside = name.removeprefix(f"{_MODULE_NAME}.")
    return tensor if inside == name or find_tensor(flat, name) is None else inside


def find_tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """The tensor of this name in a module."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch.Tensor) else None
