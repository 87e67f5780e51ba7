"""Operators that are compositions of ONNX's: there is no kernel, and a model has nothing of them but the parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.customop.in_torch import bound, tensors_of
from sardonyx.customop.signature import Identity, Signature
from sardonyx.engines.engine import Engine, Job
from sardonyx.engines.registry import find
from sardonyx.errors import DeclarationError
from sardonyx.options import Options
from sardonyx.pipeline import fit_to_engine
from sardonyx.sizes import symbol_of
from sardonyx.translate import inference
from sardonyx.translate.builder import Builder

_CALLS = itertools.count()


class Parts:
    """ONNX's operators, by their names: `op.Mul(x, 2.0)`. A number stands for a tensor of the first operand's type."""

    def __init__(self, g: Builder) -> None:
        self._g = g

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name[0].isupper():
            raise AttributeError(f"ONNX has no operator {name!r}")

        def append(*operands: Any, outputs: int = 1, **attributes: Any) -> Any:
            dtype = next((x.dtype for x in operands if isinstance(x, ir.Value)), None)
            inputs = [self._value(x, dtype) for x in operands]
            made = self._g.several(name, outputs, inputs, **attributes)
            return made[0] if outputs == 1 else made

        return append

    def op(self, name: str, *operands: Any, outputs: int = 1, **attributes: Any) -> Any:
        """An operator of any domain, with types after the names of attributes: `op.op("my::norm", x, eps_f=0.1)`."""
        return self._g.op(name, *operands, outputs=outputs, **attributes)

    def constant(self, value: Any, dtype: torch.dtype | None = None) -> ir.Value:
        """A tensor that is always the same: numbers are float32 or int64 where nothing else is said."""
        made = torch.tensor(value, dtype=dtype)
        return self._g.constant(dtypes.to_array(made), dtypes.to_onnx(made.dtype))

    def _value(self, operand: Any, dtype: ir.DataType | None) -> ir.Value | None:
        if operand is None or isinstance(operand, ir.Value):
            return operand
        if isinstance(operand, (int, float)) and not isinstance(operand, bool) and dtype is not None:
            return self.constant(operand, dtypes.to_torch(dtype))
        if isinstance(operand, (bool, int, float, list, tuple, np.ndarray)):
            return self.constant(operand.tolist() if isinstance(operand, np.ndarray) else operand)
        raise TypeError(f"an operand is {type(operand).__name__}, where ONNX has tensors")


class Composition:
    """A function that composes operators of ONNX, as a translation and as torch's kernel."""

    def __init__(
        self,
        signature: Signature,
        identity: Identity,
        function: Callable[..., Any],
        wanted: Sequence[str],
        inline: bool,
    ) -> None:
        self._signature, self._function, self._wanted, self._inline = signature, function, wanted, inline
        self._identity = identity
        self._runners: dict[Hashable, Any] = {}

    def translate(self, g: Builder, *args: Any, **kwargs: Any) -> Any:
        """The parts, in a graph under construction; marked as one function's where they are to stay together."""
        mark = len(g.nodes)
        results = self._composed(g, bound(self._signature, args, kwargs))
        if not self._inline:
            call = (str(next(_CALLS)), f"{self._identity.domain}.{self._identity.name}")
            for node in g.nodes[mark:]:
                node.meta["function"], node.meta["function_version"] = call, self._identity.version
        return results[0] if len(results) == 1 else tuple(results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As torch calls it: the parts, run by ONNX Runtime."""
        given = bound(self._signature, args, kwargs)
        key = tuple(_kind(given[p.name]) for p in self._signature.parameters)
        if key not in self._runners:
            self._runners[key] = self._runner(given)
        results = self._runners[key]([x.contiguous() for x in tensors_of(self._signature, given)])
        return results[0] if len(results) == 1 else tuple(results)

    def _composed(self, g: Builder, given: Mapping[str, Any]) -> list[ir.Value]:
        result = self._function(Parts(g), **{name: given[name] for name in self._wanted})
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(results) != len(self._signature.outputs) or not all(isinstance(x, ir.Value) for x in results):
            count = len(self._signature.outputs)
            raise DeclarationError(f"{self._signature.qualified}: its composition does not give {count} tensors")
        return results

    def _runner(self, given: Mapping[str, Any]) -> Any:
        engine = find("onnxruntime")
        model = self._model(given, engine)
        return engine.load(Job.of(ir.to_proto(model).SerializeToString(), model.graph, Options.of({})), None)

    def _model(self, given: Mapping[str, Any], engine: Engine) -> ir.Model:
        device = torch.device("cpu")
        g = Builder(engine.opset(device, frozenset()))
        inputs: list[ir.Value] = []

        def described(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                return [described(x) for x in value]
            if not isinstance(value, torch.Tensor):
                return value
            made = ir.Value(name=f"x{len(inputs)}", type=ir.TensorType(dtypes.to_onnx(value.dtype)))
            dims = [symbol_of(f"d{len(inputs)}_{i}") for i in range(value.dim())]
            inference.set_dims(made, tuple(dims))
            g.sizes.learn(made, tuple(dims))
            inputs.append(made)
            return made

        results = self._composed(g, {name: described(value) for name, value in given.items()})
        outputs = [g.Identity(x) for x in results]  # a result may be an input, or another result
        held = list(g.initializers.values())
        graph = ir.Graph(inputs, outputs, nodes=g.nodes, initializers=held, opset_imports={"": g.opset})
        model = ir.Model(graph, ir_version=opsets.IR_VERSION)
        fit_to_engine(model, engine, device, Options.of({}))
        return model


def _kind(value: Any) -> Hashable:
    """What a model is made for: the types and ranks of tensors, and attributes as they are."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim()
    return tuple(map(_kind, value)) if isinstance(value, (list, tuple)) else value
