"""Custom operators composed of ONNX operators: no kernel is needed, and models contain the nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.customop.signature import Identity, Signature
from sardonyx.customop.torch_registration import bind_arguments, tensors_of
from sardonyx.engines.engine import Engine, Job
from sardonyx.engines.registry import find
from sardonyx.errors import DeclarationError
from sardonyx.options import Options
from sardonyx.pipeline import fit_to_engine
from sardonyx.sizes import symbol_of
from sardonyx.translate import inference
from sardonyx.translate.builder import Builder

_CALL_IDS = itertools.count()


class OnnxOps:
    """ONNX operators by name: `op.Mul(x, 2.0)`. A number becomes a tensor of the first operand's type."""

    def __init__(self, g: Builder) -> None:
        self._g = g

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name[0].isupper():
            raise AttributeError(f"ONNX has no operator {name!r}")

        def append(*operands: Any, outputs: int = 1, **attributes: Any) -> Any:
            dtype = next((x.dtype for x in operands if isinstance(x, ir.Value)), None)
            inputs = [self._value(x, dtype) for x in operands]
            values = self._g.several(name, outputs, inputs, **attributes)
            return values[0] if outputs == 1 else values

        return append

    def op(self, name: str, *operands: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Add an operator of any domain; attribute names carry a type suffix: `op.op("my::norm", x, eps_f=0.1)`."""
        return self._g.op(name, *operands, outputs=outputs, **attributes)

    def constant(self, value: Any, dtype: torch.dtype | None = None) -> ir.Value:
        """Return a constant tensor; numbers are float32 or int64 by default."""
        tensor = torch.tensor(value, dtype=dtype)
        return self._g.constant(dtypes.to_array(tensor), dtypes.to_onnx(tensor.dtype))

    def _value(self, operand: Any, dtype: ir.DataType | None) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        if isinstance(operand, (int, float)) and not isinstance(operand, bool) and dtype is not None:
            return self.constant(operand, dtypes.to_torch(dtype))
        if isinstance(operand, (bool, int, float, list, tuple, np.ndarray)):
            return self.constant(operand.tolist() if isinstance(operand, np.ndarray) else operand)
        raise TypeError(f"an operand is {type(operand).__name__}, not a tensor or number")


class Composition:
    """A function that composes ONNX operators, as a translation and as torch's kernel."""

    def __init__(
        self,
        signature: Signature,
        identity: Identity,
        function: Callable[..., Any],
        parameters: Sequence[str],
        inline: bool,
    ) -> None:
        self._signature, self._function, self._parameters, self._inline = signature, function, parameters, inline
        self._identity = identity
        self._runners: dict[Hashable, Any] = {}

    def translate(self, g: Builder, *args: Any, **kwargs: Any) -> Any:
        """Add the nodes to a graph; without `inline`, marked as one ONNX function."""
        start = len(g.nodes)
        results = self._compose(g, bind_arguments(self._signature, args, kwargs))
        if not self._inline:
            call = (str(next(_CALL_IDS)), f"{self._identity.domain}.{self._identity.name}")
            for node in g.nodes[start:]:
                node.meta["function"], node.meta["function_version"] = call, self._identity.version
        return results[0] if len(results) == 1 else tuple(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the nodes with ONNX Runtime, as torch's kernel."""
        arguments = bind_arguments(self._signature, args, kwargs)
        key = tuple(_argument_key(arguments[p.name]) for p in self._signature.parameters)
        if key not in self._runners:
            self._runners[key] = self._runner(arguments)
        results = self._runners[key]([x.contiguous() for x in tensors_of(self._signature, arguments)])
        return results[0] if len(results) == 1 else tuple(results)

    def _compose(self, g: Builder, arguments: Mapping[str, Any]) -> list[ir.Value]:
        result = self._function(OnnxOps(g), **{name: arguments[name] for name in self._parameters})
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(self._signature.outputs) or not all(isinstance(x, ir.Value) for x in results):
            count = len(self._signature.outputs)
            raise DeclarationError(f"{self._signature.qualified}: its composition does not return {count} tensors")
        return results

    def _runner(self, arguments: Mapping[str, Any]) -> Any:
        engine = find("onnxruntime")
        model = self._model(arguments, engine)
        return engine.load(Job.of(ir.to_proto(model).SerializeToString(), model.graph, Options.of({})), None)

    def _model(self, arguments: Mapping[str, Any], engine: Engine) -> ir.Model:
        device = torch.device("cpu")
        g = Builder(engine.opset(device, frozenset()))
        inputs: list[ir.Value] = []

        def symbolic(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                return [symbolic(x) for x in value]
            if not isinstance(value, torch.Tensor):
                return value
            tensor = ir.Value(name=f"x{len(inputs)}", type=ir.TensorType(dtypes.to_onnx(value.dtype)))
            dims = [symbol_of(f"d{len(inputs)}_{i}") for i in range(value.dim())]
            inference.set_dims(tensor, tuple(dims))
            g.sizes.learn(tensor, tuple(dims))
            inputs.append(tensor)
            return tensor

        results = self._compose(g, {name: symbolic(value) for name, value in arguments.items()})
        outputs = [g.Identity(x) for x in results]  # a result may be an input or equal another result
        initializers = list(g.initializers.values())
        graph = ir.Graph(inputs, outputs, nodes=g.nodes, initializers=initializers, opset_imports={"": g.opset})
        model = ir.Model(graph, ir_version=opsets.IR_VERSION)
        fit_to_engine(model, engine, device, Options.of({}))
        return model


def _argument_key(value: Any) -> Hashable:
    """Return the cache key of an argument: dtype and rank of tensors, attributes as they are."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return tuple(map(_argument_key, value)) if isinstance(value, (list, tuple)) else value
