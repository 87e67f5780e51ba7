"""A part of the graph that torch.export traced: some of its calls, with recorded values for what they read."""

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
    """Calls of operators, in order, and the values that they may read: weights, inputs, and what others computed.

    As ONNX it is exported anew, each part by itself: what torch computes from the same inputs is what is right.
    """

    nodes: tuple[torch.fx.Node, ...]
    root: torch.fx.GraphModule
    """The graph that the nodes are of."""
    weights: frozenset[torch.fx.Node]
    """What is held by the model, and no input."""
    recorded: Values
    ends: frozenset[torch.fx.Node]
    """Results of the whole model, which stay results."""
    way: RunConfig
    against: RunConfig

    @classmethod
    def of(cls, module: torch.nn.Module, call: CallArguments, way: RunConfig, against: RunConfig) -> TracedCase:
        """All of a module, with every value that a call of it goes through in torch."""
        from sardonyx.capture.export import capture

        captured = capture(module, *call)
        graph, leaves = captured.graph, leaves_of(captured, call)
        placeholders = graph.graph.find_nodes(op="placeholder")
        held = {node: captured.held[i][1].detach() for i, node in enumerate(placeholders) if i in captured.held}
        given = {node: leaves[captured.given[i]] for i, node in enumerate(placeholders) if i in captured.given}
        run = Interpreter(graph, None)
        run.env = {**held, **given}
        for node in graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                with torch.no_grad():
                    run.env[node] = run.run_node(node)
        calls = tuple(x for x in graph.graph.nodes if x.op == "call_function" and not _is_result_getitem(x, run.env))
        ends = frozenset(x for x in captured.returned if isinstance(x, torch.fx.Node))
        return cls(calls, graph, frozenset(held), run.env, ends, way, against)

    def of_nodes(self, nodes: Any) -> TracedCase:
        """The same with fewer nodes."""
        return replace(self, nodes=tuple(nodes))

    @property
    def operators(self) -> list[str]:
        """What is called."""
        return [str(node.target) for node in self.nodes]

    @property
    def runs_alone(self) -> bool:
        """Whether it computes a tensor."""
        return bool(self.nodes) and bool(self.outputs)

    @cached_property
    def read(self) -> list[torch.fx.Node]:
        """The tensors that the nodes read and do not compute."""
        made = set(self._copied)
        names = dict.fromkeys(x for node in self._copied for x in node.all_input_nodes if x not in made)
        return [node for node in names if isinstance(self.recorded[node], torch.Tensor)]

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """The values of its inputs."""
        return {node.name: self.recorded[node] for node in self._inputs}

    @property
    def _inputs(self) -> list[torch.fx.Node]:
        return [node for node in self.read if node not in self.weights]

    @cached_property
    def _copied(self) -> list[torch.fx.Node]:
        """The nodes, and after one of several results the nodes that take it apart."""
        return [
            x for node in self.nodes for x in (node, *(y for y in node.users if _is_result_getitem(y, self.recorded)))
        ]

    @property
    def outputs(self) -> list[torch.fx.Node]:
        """The tensors that no node of it reads, and results of the whole."""
        inner = {x for node in self._copied for x in node.all_input_nodes}
        tensors = [node for node in self._copied if isinstance(self.recorded[node], torch.Tensor)]
        return [node for node in tensors if node not in inner or node in self.ends]

    @cached_property
    def module(self) -> torch.fx.GraphModule:
        """It as a module of its inputs; what is no tensor is written into its calls."""
        graph, held = torch.fx.Graph(), dict[str, Any]()
        made: dict[torch.fx.Node, Any] = {node: graph.placeholder(node.name) for node in self._inputs}

        def operand(node: torch.fx.Node) -> Any:
            if node not in made:
                made[node] = self.recorded[node]
                if node in self.weights or node.op == "get_attr":
                    name = node.name if node in self.weights else str(node.target).replace(".", "_")
                    held[name] = self.recorded[node]
                    made[node] = graph.get_attr(name)
            return made[node]

        for node in self._copied:
            assert callable(node.target)
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            made[node] = graph.call_function(node.target, args, kwargs)
        graph.output(tuple(made[node] for node in self.outputs))
        return torch.fx.GraphModule(_module_with(held), graph).eval()

    @cached_property
    def _program(self) -> Any:
        from sardonyx.doors.export import export

        assert self.way.options is not None
        chosen: dict[str, Any] = {"opset": opset_for([self.way]), "translator": self.way.options.translator}
        return export(self.module, list(self.given.values()), optimize="none", **chosen)

    def model(self) -> onnx.ModelProto:
        """It as it is exported, without rewrites."""
        proto: onnx.ModelProto = self._program.proto()
        return proto

    def feeds(self) -> dict[str, Array]:
        """The values of the exported model's inputs."""
        leaves = self._program.calling.flatten(tuple(self.given.values()), {})
        return {name: dtypes.to_array(tensor_of(x)) for name, x in zip(self._program.inputs, leaves, strict=True)}

    def results(self) -> list[torch.Tensor]:
        """What torch computes."""
        dtype = self.against.dtype
        run = Interpreter(self.module, dtype)
        with torch.no_grad():
            return list(run.run(*(cast_floating(x, dtype) for x in self.given.values())))

    def expected(self) -> list[Array]:
        """The same, as the outputs of the exported model: in its order, complex numbers as pairs."""
        found: dict[int, torch.Tensor] = {}
        for result, right in zip(self._program.calling.binding.results, self.results(), strict=True):
            if result.output is not None:
                found[result.output] = torch.view_as_real(right.resolve_conj()) if right.is_complex() else right
        return [dtypes.to_array(found[index]) for index in range(len(found))]


def _is_result_getitem(node: torch.fx.Node, recorded: Values) -> bool:
    """Whether a node does no more than take one of several results."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, torch.fx.Node) and isinstance(recorded[source], (tuple, list))


def _module_with(held: Mapping[str, Any]) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in held.items():
        if isinstance(value, torch.Tensor):
            module.register_buffer(name, value)
        else:
            module.add_module(name, value)
    return module


def simplify_values(case: TracedCase, fails: Callable[[TracedCase], bool]) -> TracedCase:
    """With numbers that say nothing, where it fails all the same: weights and inputs of ones, or random."""
    for node, value in list(_float_tensors(case)):
        for plain in (torch.ones_like(value), _random(value)):
            if fails(changed := replace(case, recorded={**case.recorded, node: plain})):
                case = changed
                break
    return case


def _float_tensors(case: TracedCase) -> Iterator[tuple[torch.fx.Node, torch.Tensor]]:
    """What has real numbers: integers are indices and sizes."""
    values = ((node, case.recorded[node]) for node in case.read)
    return ((node, value) for node, value in values if value.is_floating_point())


def _random(value: torch.Tensor) -> torch.Tensor:
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)


TRACED_PASSES: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("fewer calls", fewer_nodes),
    ("plainer numbers", simplify_values),
    ("fewer calls", fewer_nodes),
)
"""What is tried, in order; sizes stay, for calls have them as arguments."""
