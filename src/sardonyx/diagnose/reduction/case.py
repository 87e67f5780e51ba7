"""A part of a model that can run alone: some of its nodes, with recorded values for their inputs."""

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
"""Elements up to which a weight may be a shape."""


@dataclass(frozen=True)
class Case:
    """Nodes of a model, in order, and the values that they may read: weights, inputs and recorded values."""

    nodes: tuple[onnx.NodeProto, ...]
    weights: Arrays
    recorded: Arrays
    """Values of the model's inputs and of its nodes' outputs, for nodes that are left out."""
    ends: frozenset[str]
    """Outputs of the whole model, which stay outputs."""
    opsets: tuple[onnx.OperatorSetIdProto, ...]
    ir_version: int

    @classmethod
    def of(cls, model: onnx.ModelProto, inputs: Arrays) -> Case:
        """Return the case of a whole model."""
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
        """Return the case with these nodes only."""
        return replace(self, nodes=tuple(nodes))

    @property
    def operators(self) -> list[str]:
        """Operators of the nodes."""
        return [node.op_type for node in self.nodes]

    @cached_property
    def computed(self) -> set[str]:
        """Names of the values that the nodes compute."""
        return {name for node in self.nodes for name in node.output if name}

    @cached_property
    def read(self) -> list[str]:
        """Names of the values that the nodes read and do not compute."""
        names = dict.fromkeys(name for node in self.nodes for name in reads_of(node))
        return [name for name in names if name not in self.computed]

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs: values that are read, and are not weights."""
        return [name for name in self.read if name not in self.weights]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs: values that no node of the case reads, and outputs of the whole model."""
        inner = {name for node in self.nodes for name in reads_of(node)}
        every = [name for node in self.nodes for name in node.output if name]
        return [name for name in every if name not in inner or name in self.ends]

    @property
    def runs_alone(self) -> bool:
        """Whether every value that it reads was recorded."""
        return bool(self.nodes) and all(name in self.recorded for name in self.inputs)

    @property
    def input_values(self) -> dict[str, Array]:
        """Values of its inputs."""
        return {name: self.recorded[name] for name in self.inputs}

    def feeds(self) -> dict[str, Array]:
        """Return the values of the model's inputs."""
        return self.input_values

    def model(self, outputs: Collection[str] | None = None) -> onnx.ModelProto:
        """Return the case as a model, with inputs of the recorded types and shapes."""
        inputs = [_value_info(name, self.recorded[name]) for name in self.inputs]
        names = self.outputs if outputs is None else outputs
        weights = [numpy_helper.from_array(self.weights[name], name) for name in self.read if name in self.weights]
        results = [onnx.ValueInfoProto(name=name) for name in names]
        graph = helper.make_graph(self.nodes, "reduced", inputs, results, weights)
        return helper.make_model(graph, opset_imports=self.opsets, ir_version=self.ir_version)

    def outline(self) -> onnx.ModelProto:
        """Return the case as a model for shape inference: large weights are inputs."""
        read = {name: self.weights[name] for name in self.read if name in self.weights}
        few = {name: array for name, array in read.items() if array.size <= _FEW}
        return replace(self, weights=few, recorded={**self.recorded, **read}).model()


def _value_info(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def reads_of(node: onnx.NodeProto) -> Iterator[str]:
    """Iterate over the names that a node reads, in its branches and loop bodies too."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            own = {x.name for x in (*body.input, *body.initializer)} | {n for x in body.node for n in x.output}
            names = (name for inner in body.node for name in reads_of(inner))
            yield from (name for name in (*names, *(x.name for x in body.output)) if name and name not in own)
