"""A part of a model that runs by itself: some of its nodes, with recorded values for what they read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sardonyx.opsets import IR_VERSION

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = Mapping[str, Array]

_FEW = 64
"""Numbers that a weight has which may be a shape."""


@dataclass(frozen=True)
class Case:
    """Nodes of a model, in order, and the values that they may read: weights, inputs, and what others computed."""

    nodes: tuple[onnx.NodeProto, ...]
    weights: Arrays
    recorded: Arrays
    """The model's inputs, and values that its nodes compute: what a node that is left out gave."""
    ends: frozenset[str]
    """Results of the whole model, which stay results."""
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    ir_version: int

    @classmethod
    def of(cls, model: onnx.ModelProto, inputs: Arrays) -> Case:
        """All of a model."""
        weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        ends = frozenset(x.name for x in model.graph.output)
        return cls(
            tuple(model.graph.node),
            weights,
            inputs,
            ends,
            tuple(model.opset_import),
            min(model.ir_version, IR_VERSION),
        )

    def of_nodes(self, nodes: Sequence[onnx.NodeProto]) -> Case:
        """The same with fewer nodes."""
        return replace(self, nodes=tuple(nodes))

    @property
    def operators(self) -> list[str]:
        """What the nodes are."""
        return [node.op_type for node in self.nodes]

    @cached_property
    def made(self) -> set[str]:
        """What the nodes compute."""
        return {name for node in self.nodes for name in node.output if name}

    @cached_property
    def read(self) -> list[str]:
        """What the nodes read and do not compute."""
        names = dict.fromkeys(name for node in self.nodes for name in reads_of(node))
        return [name for name in names if name not in self.made]

    @property
    def inputs(self) -> list[str]:
        """What has to be given."""
        return [name for name in self.read if name not in self.weights]

    @property
    def outputs(self) -> list[str]:
        """What no node of it reads, and results of the whole."""
        inner = {name for node in self.nodes for name in reads_of(node)}
        every = [name for node in self.nodes for name in node.output if name]
        return [name for name in every if name not in inner or name in self.ends]

    @property
    def runs_alone(self) -> bool:
        """Whether every value that it reads is known."""
        return bool(self.nodes) and all(name in self.recorded for name in self.inputs)

    @property
    def given(self) -> dict[str, Array]:
        """The values of its inputs."""
        return {name: self.recorded[name] for name in self.inputs}

    def feeds(self) -> dict[str, Array]:
        """The same, as the model takes them."""
        return self.given

    def model(self, outputs: Collection[str] | None = None) -> onnx.ModelProto:
        """It as a model, with inputs of the types and sizes that were recorded."""
        given = [_described(name, self.recorded[name]) for name in self.inputs]
        wanted = self.outputs if outputs is None else outputs
        held = [numpy_helper.from_array(self.weights[name], name) for name in self.read if name in self.weights]
        results = [onnx.ValueInfoProto(name=name) for name in wanted]
        graph = helper.make_graph(self.nodes, "reduced", given, results, held)
        return helper.make_model(graph, opset_imports=self.opsets, ir_version=self.ir_version)

    def outline(self) -> onnx.ModelProto:
        """It as a model to find sizes in: weights with more numbers than a shape has are inputs."""
        read = {name: self.weights[name] for name in self.read if name in self.weights}
        few = {name: array for name, array in read.items() if array.size <= _FEW}
        return replace(self, weights=few, recorded={**self.recorded, **read}).model()


def _described(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def reads_of(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, its branches and loop bodies included."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            own = {x.name for x in (*body.input, *body.initializer)} | {n for x in body.node for n in x.output}
            names = (name for inner in body.node for name in reads_of(inner))
            yield from (name for name in (*names, *(x.name for x in body.output)) if name and name not in own)
