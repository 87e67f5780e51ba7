"""Functions that programs written by the option `repro` call: run a graph, or export a module, again."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sardonyx.doors.dynamo import sardonyx as backend
from sardonyx.doors.export import export
from sardonyx.options import Options
from sardonyx.pipeline import compile_graph
from sardonyx.telemetry.repro import VALUES, Door, Tensor
from sardonyx.telemetry.repro_capture import CALL

__all__ = ["Tensor", "capture_again", "reproduce", "traced", "values_in"]


def values_in(folder: Path) -> Mapping[str, torch.Tensor]:
    """Load the saved tensors; empty if they were too large."""
    path = folder / VALUES
    return torch.load(path, weights_only=True) if path.exists() else {}


def reproduce(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    values: Mapping[str, torch.Tensor],
    options: Mapping[str, Any],
    *,
    door: Door,
    kind: str,
    weights: Sequence[int],
) -> Any:
    """Compile and run a graph as when it failed; return its results if it does not fail.

    Values that were not saved are random.
    """
    args = [values.get(str(i), x.make(i) if isinstance(x, Tensor) else x) for i, x in enumerate(inputs)]
    chosen = Options.of(options)
    if door == "export":
        return export(module, args, **options)
    if door == "dynamo":
        return torch.compile(module, backend=lambda graph, example: backend(graph, example, options=chosen))(*args)
    with torch.no_grad():
        graph = traced(module, inputs, args)
        return compile_graph(graph, kind, frozenset(weights), chosen).run(list(args))


def traced(module: torch.nn.Module, inputs: Sequence[Any], args: Sequence[Any]) -> torch.fx.GraphModule:
    """Return the graph of a module that was written from one, node for node, with fake tensors as metadata.

    With branches or loops torch traces it, which may change nodes.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # slow to import

    if list(module.children()):
        from torch.fx.experimental.proxy_tensor import make_fx

        dynamic = any(isinstance(x, Tensor) and x.dynamic for x in inputs)
        return make_fx(module, tracing_mode="symbolic" if dynamic else "fake")(*args)
    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    graph = torch.fx.symbolic_trace(module)
    expected = [_fake_argument(fake, i, x, arg) for i, (x, arg) in enumerate(zip(inputs, args, strict=True))]
    _Propagate(graph, fake).run(*expected)
    return graph


def _fake_argument(fake: FakeTensorMode, index: int, metadata: Any, arg: Any) -> Any:
    """Return the fake tensor of an argument: dynamic sizes are symbols, the same for equal sizes."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    source, shapes = ConstantSource(f"input_{index}"), fake.shape_env
    assert shapes is not None
    if isinstance(metadata, Tensor):
        sizes = [DimDynamic.DUCK if i in metadata.dynamic else DimDynamic.STATIC for i in range(arg.dim())]
        return fake.from_tensor(arg, source=source, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
    if isinstance(metadata, int) and not isinstance(metadata, bool):
        symbol = shapes.create_symbol(metadata, source, dynamic_dim=DimDynamic.DUCK)
        return shapes.create_symintnode(symbol, hint=metadata, source=source)
    return arg


class _Propagate(torch.fx.Interpreter):
    """Runs a graph on fake tensors, and stores each node's result in its metadata."""

    def __init__(self, graph: torch.fx.GraphModule, fake: FakeTensorMode) -> None:
        super().__init__(graph)
        self._fake = fake

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the whole graph."""
        with self._fake:
            return super().run(*args, **kwargs)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node."""
        n.meta["val"] = result = super().run_node(n)
        return result


# A module that torch.export cannot capture


def capture_again(program: str, defined: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Export the module in the folder of a program as when it failed; return the result if it does not fail.

    `defined` are the classes and functions of the program. Values that were not saved are random.
    """
    folder = Path(program).parent
    call = _Unpickler((folder / CALL).read_bytes(), defined, values_in(folder)).load()
    dynamic = {"dynamic_shapes": call.dynamic_shapes, "examples": call.examples}
    return export(call.module, call.args, call.kwargs, **dynamic, **options)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, defined: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(BytesIO(content))
        self._defined, self._values = defined, values
        self._tensors: dict[int, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> Any:
        """Return the object that `persistent_id` replaced."""
        if pid[0] == "tensor":
            return self._tensor(*pid[1:])
        first, *rest = pid[1].split(".")
        value = self._defined[first]
        for name in rest:
            value = getattr(value, name)
        return value

    def _tensor(self, number: int, metadata: Tensor, is_parameter: bool, needs_gradient: bool) -> torch.Tensor:
        if number not in self._tensors:
            value = self._values[str(number)] if str(number) in self._values else metadata.make(number)
            tensor = torch.nn.Parameter(value, needs_gradient) if is_parameter else value.requires_grad_(needs_gradient)
            self._tensors[number] = tensor
        return self._tensors[number]
