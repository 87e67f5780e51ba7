"""A part of the graph that torch.export traced: some of its calls, with recorded values for their inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import onnx
import torch

from sardonyx import dtypes
from sardonyx.diagnose.comparison.comparing import opset_for
from sardonyx.diagnose.comparison.run_config import RunConfig
from sardonyx.diagnose.comparison.subject import CallArguments, leaves_of, tensor_of
from sardonyx.diagnose.comparison.trace import Interpreter, cast_floating
from sardonyx.diagnose.reduction.case import Array
from sardonyx.diagnose.reduction.smaller import fewer_nodes

Values: TypeAlias = "Mapping[torch.fx.Node, Any]"


@dataclass(frozen=True)
class TracedCase:
    """Calls of operators, in order, and the values that they may read: weights, inputs and recorded values.

    Each case is exported separately; what torch computes from the same inputs is the reference.
    """

    nodes: tuple[torch.fx.Node, ...]
    root: torch.fx.GraphModule
    """The graph that the nodes belong to."""
    weights: frozenset[torch.fx.Node]
    """Placeholders of weights and buffers."""
    recorded: Values
    ends: frozenset[torch.fx.Node]
    """Outputs of the whole model, which stay outputs."""
    way: RunConfig
    against: RunConfig

    @classmethod
    def of(cls, module: torch.nn.Module, call: CallArguments, way: RunConfig, against: RunConfig) -> TracedCase:
        """Return the case of a whole module, with all intermediate values of a call in torch."""
        from sardonyx.capture.export import capture

        captured = capture(module, *call)
        graph, leaves = captured.graph, leaves_of(captured, call)
        placeholders = graph.graph.find_nodes(op="placeholder")
        weights = {
            node: captured.weights[i][1].detach() for i, node in enumerate(placeholders) if i in captured.weights
        }
        inputs = {node: leaves[captured.inputs[i]] for i, node in enumerate(placeholders) if i in captured.inputs}
        run = Interpreter(graph, None)
        run.env = {**weights, **inputs}
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                with torch.no_grad():
                    run.env[node] = run.run_node(node)
        calls = tuple(x for x in graph.graph.nodes if x.op == "call_function" and not _is_result_getitem(x, run.env))
        ends = frozenset(x for x in captured.returned if isinstance(x, torch.fx.Node))
        return cls(calls, graph, frozenset(weights), run.env, ends, way, against)

    def of_nodes(self, nodes: Any) -> TracedCase:
        """Return the case with these nodes only."""
        return replace(self, nodes=tuple(nodes))

    @property
    def operators(self) -> list[str]:
        """Operators of the calls."""
        return [str(node.target) for node in self.nodes]

    @property
    def runs_alone(self) -> bool:
        """Whether it computes a tensor."""
        return bool(self.nodes) and bool(self.outputs)

    @cached_property
    def read(self) -> list[torch.fx.Node]:
        """Nodes of the tensors that are read and not computed."""
        computed = set(self._copied)
        inputs = dict.fromkeys(x for node in self._copied for x in node.all_input_nodes if x not in computed)
        return [node for node in inputs if isinstance(self.recorded[node], torch.Tensor)]

    @property
    def input_values(self) -> dict[str, torch.Tensor]:
        """Values of its inputs."""
        return {node.name: self.recorded[node] for node in self._inputs}

    @property
    def _inputs(self) -> list[torch.fx.Node]:
        return [node for node in self.read if node not in self.weights]

    @cached_property
    def _copied(self) -> list[torch.fx.Node]:
        """The nodes, each followed by the `getitem` calls on its results."""
        return [
            x for node in self.nodes for x in (node, *(y for y in node.users if _is_result_getitem(y, self.recorded)))
        ]

    @property
    def outputs(self) -> list[torch.fx.Node]:
        """Nodes of tensors that no node of the case reads, and outputs of the whole model."""
        inner = {x for node in self._copied for x in node.all_input_nodes}
        tensors = [node for node in self._copied if isinstance(self.recorded[node], torch.Tensor)]
        return [node for node in tensors if node not in inner or node in self.ends]

    @cached_property
    def module(self) -> torch.fx.GraphModule:
        """The case as a module; values that are not tensors are constants in its calls."""
        graph, attributes = torch.fx.Graph(), dict[str, Any]()
        copies: dict[torch.fx.Node, Any] = {node: graph.placeholder(node.name) for node in self._inputs}

        def operand(node: torch.fx.Node) -> Any:
            if node not in copies:
                copies[node] = self.recorded[node]
                if node in self.weights or node.op == "get_attr":
                    name = node.name if node in self.weights else str(node.target).replace(".", "_")
                    attributes[name] = self.recorded[node]
                    copies[node] = graph.get_attr(name)
            return copies[node]

        for node in self._copied:
            assert callable(node.target)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            copies[node] = graph.call_function(node.target, args, kwargs)
        graph.output(tuple(copies[node] for node in self.outputs))
        return torch.fx.GraphModule(_module_with(attributes), graph).eval()

    @cached_property
    def _program(self) -> Any:
        from sardonyx.doors.export import export

        assert self.way.options is not None
        chosen: dict[str, Any] = {"opset": opset_for([self.way]), "translator": self.way.options.translator}
        return export(self.module, list(self.input_values.values()), optimize="none", **chosen)

    def model(self) -> onnx.ModelProto:
        """Return the exported model, without rewrites."""
        proto: onnx.ModelProto = self._program.proto()
        return proto

    def feeds(self) -> dict[str, Array]:
        """Return the values of the exported model's inputs."""
        leaves = self._program.call_spec.flatten(tuple(self.input_values.values()), {})
        return {name: dtypes.to_array(tensor_of(x)) for name, x in zip(self._program.inputs, leaves, strict=True)}

    def results(self) -> list[torch.Tensor]:
        """Return the results that torch computes."""
        dtype = self.against.dtype
        run = Interpreter(self.module, dtype)
        with torch.no_grad():
            return list(run.run(*(cast_floating(x, dtype) for x in self.input_values.values())))

    def expected(self) -> list[Array]:
        """Return torch's results as outputs of the exported model: in its order, complex numbers as pairs."""
        outputs: dict[int, torch.Tensor] = {}
        for result, value in zip(self._program.call_spec.binding.results, self.results(), strict=True):
            if result.output is not None:
                outputs[result.output] = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        return [dtypes.to_array(outputs[index]) for index in range(len(outputs))]


def _is_result_getitem(node: torch.fx.Node, recorded: Values) -> bool:
    """Whether a node is a `getitem` on a tuple of results."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, torch.fx.Node) and isinstance(recorded[source], (tuple, list))


def _module_with(attributes: Mapping[str, Any]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):
            module.register_buffer(name, value)
        else:
            module.add_module(name, value)
    return module


def simplify_values(case: TracedCase, fails: Callable[[TracedCase], bool]) -> TracedCase:
    """Replace weights and inputs by ones or random values, if the case still fails."""
    for node, value in list(_float_tensors(case)):
        for plain in (torch.ones_like(value), _random(value)):
            if fails(changed := replace(case, recorded={**case.recorded, node: plain})):
                case = changed
                break
    return case


def _float_tensors(case: TracedCase) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """Iterate over the floating-point tensors: integers may be indices and sizes."""
    values = ((node, case.recorded[node]) for node in case.read)
    return ((node, value) for node, value in values if value.is_floating_point())


def _random(value: torch.Tensor) -> torch.Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)


TRACED_PASSES: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("fewer calls", fewer_nodes),
    ("simpler values", simplify_values),
    ("fewer calls", fewer_nodes),
)
"""Passes in order; sizes are not shrunk, because calls have them as arguments."""
