"""Trace one call of a module to a graph of its tensors, with a guard for the calls it is valid for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sardonyx.capture.arguments import Arguments, ResultBuilder, Results, contents_of_containers, copy_arguments
from sardonyx.capture.attributes import first_difference
from sardonyx.capture.conditions import SizeExpressions, function_of_sizes
from sardonyx.capture.export import Captured, capture
from sardonyx.errors import CaptureError
from sardonyx.sizes import Dim, dim_of, dims_of, environment_of

_MODULE_NAME = "module"


class FlatModule(torch.nn.Module):
    """A module that takes the flattened tensors of a call, and returns those that it computes.

    All other arguments are constants of the traced graph.
    """

    results: Results
    symbolic: list[torch.SymInt]

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        call: Any,
        dynamic: Collection[int] = (),
        state: Callable[[], tuple[Any, ...]] = tuple,
    ) -> None:
        super().__init__()
        self._state = state
        self.add_module(_MODULE_NAME, module)
        arguments = Arguments.of(call)
        self._forward, self._call = forward, call
        self._integers, self._count, self._dynamic = arguments.integers, len(arguments.tensors), sorted(dynamic)
        self._gaps = arguments.gaps

    def forward(self, *flat: Any) -> tuple[torch.Tensor, ...]:
        """Call the module, and set `results`, which rebuilds its results."""
        tensors, integers = flat[: self._count], list(self._integers)
        for index, integer in zip(self._dynamic, flat[self._count :], strict=True):
            integers[index] = integer
        copy = copy_arguments(self._call, tensors, integers)
        before = contents_of_containers(copy)
        args, kwargs = copy.value
        state = self._state()
        result = self._forward(*args, **kwargs)
        self._refuse_change(state, self._state())
        self.symbolic = []
        self.results = Results(result, copy, before, tensors, self._gaps, self._size)
        return self.results.take_tensors()

    def _refuse_change(self, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        if before != after:
            changed = first_difference(before, after)
            raise CaptureError(f"forward changes the attribute {changed!r}, which a compiled module does not support")

    def _size(self, size: torch.SymInt) -> ResultBuilder:
        index = len(self.symbolic)
        self.symbolic.append(size)
        return lambda call: call.sizes[index]


@dataclass(frozen=True)
class ModuleTrace:
    """The graph of a traced call."""

    graph: torch.fx.GraphModule
    weights: Mapping[int, str | torch.Tensor]
    """Placeholders that are weights: the name in the module, or the tensor if it is a constant of the code."""
    inputs: Mapping[int, int]
    """Placeholders that are arguments: the index among the call's tensors followed by its dynamic integers."""
    dynamic: tuple[int, ...]
    """The indices of a call's integers that are inputs."""
    results: Results
    accepts: Callable[[Sequence[int]], bool]
    """The guard: whether the graph is valid for calls of these sizes."""
    condition: str
    """The guard as a Python expression of `sizes`."""
    numbers: Callable[[Sequence[int]], Sequence[int]]
    """Computes the symbolic integers among the results from a call's sizes."""
    is_dynamic: bool
    has_numbers: bool = False

    @property
    def random(self) -> bool:
        """Whether it draws random numbers."""
        return any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in self.graph.graph.nodes)


def trace(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    call: Any,
    arguments: Arguments,
    varying: Collection[int],
    state: Callable[[], tuple[Any, ...]],
    preserved: Collection[str] = (),
) -> ModuleTrace:
    """Trace a call. `varying` are the indices in `Arguments.sizes` that are to be symbolic if possible.

    `state` returns a key of the module's attributes, to detect that forward changes them: torch.export reverts such
    changes and omits them from the graph. Operators named in `preserved` are not decomposed.
    """
    first = sum(tensor.dim() for tensor in arguments.tensors)
    dynamic = tuple(place - first for place in sorted(varying) if place >= first)
    flat = FlatModule(module, forward, call, dynamic, state)
    auto: Any = torch.export.Dim.AUTO
    specs: list[Any] = []
    at = 0
    for tensor in arguments.tensors:
        specs.append({axis: auto for axis, size in enumerate(tensor.shape) if at + axis in varying and size > 1})
        at += tensor.dim()
    inputs = (*arguments.to_trace(), *(arguments.integers[index] for index in dynamic))
    with torch.inference_mode(False):
        captured = capture(flat, inputs, {}, ((*specs, *(auto for _ in dynamic)),), preserved)
    _refuse_edits(captured)
    return _new_trace(captured, flat, arguments, dynamic)


def _refuse_edits(captured: Captured) -> None:
    modified = "an argument in place" if captured.mutated else "a buffer" if captured.buffers else None
    if modified:
        raise CaptureError(
            f"forward modifies {modified}, which a compiled module does not support",
            hint='use fallback="warn", which runs it by torch.compile(model, backend="sardonyx")',
        )


def _new_trace(captured: Captured, flat: FlatModule, arguments: Arguments, dynamic: tuple[int, ...]) -> ModuleTrace:
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
    """Compile the guard of a trace."""
    try:
        return function_of_sizes(sizes.condition())
    except ValueError as error:
        raise CaptureError(f"a guard of the trace is not integer arithmetic: {error}") from error


def _weight(flat: FlatModule, name: str, tensor: torch.Tensor) -> str | torch.Tensor:
    """Return the name of a tensor of the module; other tensors are constants of its code."""
    inside = name.removeprefix(f"{_MODULE_NAME}.")
    return tensor if inside == name or find_tensor(flat, name) is None else inside


def find_tensor(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the tensor of this dotted name in a module; None if there is none."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, torch.Tensor) else None
