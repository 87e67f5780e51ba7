"""An exported model: a callable ONNX model whose weights stay in torch's memory until they are saved."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import sympy
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch.utils import _pytree as pytree

from sardonyx import fork
from sardonyx.capture.conditions import Condition, function_of_sizes, sizes_or_number
from sardonyx.capture.export import Captured
from sardonyx.capture.regions import Result
from sardonyx.doors.call_arguments import Argument, structure_difference
from sardonyx.engines import Job, Runner, artifacts
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.model_files import LARGEST_PROTOBUF, weight_bytes
from sardonyx.optimize.empty import computed_sizes
from sardonyx.options import Options
from sardonyx.pipeline import fit_to_engine, refit
from sardonyx.run.binding import Binding, restore_result
from sardonyx.run.file_weights import extract_weights
from sardonyx.sizes import python_of, size_at
from sardonyx.telemetry.report import Report, observed


@dataclass(frozen=True)
class CallSpec:
    """How arguments become the model's inputs, and the model's outputs the results."""

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    names: Sequence[str]
    """The names of the arguments."""
    arguments: Sequence[Argument]
    """The flattened arguments."""
    binding: Binding
    """The flattened argument of each input of the model, and how outputs become flattened results."""
    mutated: Mapping[int, Result] = field(default_factory=dict)
    """For each flattened argument that the module modifies in place, the output with its new value."""
    conditions: Sequence[Condition] = ()
    """The guards of the trace on sizes and numbers."""

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the model's inputs for the arguments of a call; raises if they do not match the example."""
        return self.feeds(self.leaves(args, kwargs))

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the flattened arguments; raises if their structure differs from the example's."""
        named = self.in_spec.children()[1].context
        if set(kwargs) != set(named) or len(args) != self.in_spec.children()[0].num_children:
            raise TypeError(
                f"the model was exported for {self.in_spec.children()[0].num_children} positional arguments and the "
                f"keywords {list(named)}, and is called with {len(args)} and {list(kwargs)}"
            )
        call = tuple(args), {name: kwargs[name] for name in named}
        leaves, spec = pytree.tree_flatten(call)
        if spec != self.in_spec:
            raise TypeError(f"{structure_difference(self.names, call, self.in_spec)}; export it again with that")
        return leaves

    def feeds(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the model's inputs for flattened arguments; raises if they do not match the example."""
        fed = [argument.feed(leaf) for argument, leaf in zip(self.arguments, leaves, strict=True)]
        numbers = [size for leaf in leaves for size in sizes_or_number(leaf)] if self.conditions else []
        for condition in self.conditions:
            condition.check(numbers)
        return self.binding.feeds(fed)


def calibration_calls(calibration: Any) -> list[Any]:
    """Return the calls of `calibration`, checked to be a list of tuples, dicts or tensors that have data."""
    hint = "give a list of calls, each a tuple of arguments or a dict of them by name"
    if isinstance(calibration, (torch.Tensor, str, Mapping)) or not isinstance(calibration, Iterable):
        raise OptionError(f"calibration= is a {type(calibration).__name__}", hint=hint)
    calls = list(calibration)
    for call in calls:
        if isinstance(call, str) or not isinstance(call, (torch.Tensor, Mapping, Sequence)):
            raise OptionError(f"a call of calibration= is a {type(call).__name__}", hint=hint)
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in pytree.tree_leaves(call)):
            raise OptionError("a call of calibration= has a tensor without data, on the device 'meta'", hint=hint)
    return calls


def calibration_inputs(call_spec: CallSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the model's inputs in a calibration call; raise if it does not match the model."""
    try:
        return [torch.as_tensor(x).detach() for x in call_spec.flatten(args, kwargs)]
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"a call of calibration= does not match the model: {error}",
            hint="give each as the model is called: a tuple of arguments, or a dict of them by name",
        ) from error


class Program:
    """An ONNX model that can be called and saved: the result of `sardonyx.export` and `sardonyx.optimize`.

    >>> import sardonyx
    >>> program = sardonyx.export(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),))
    >>> program(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        model: ir.Model,
        call_spec: CallSpec,
        device: torch.device,
        options: Options,
        report: Report,
        library: Path | None = None,
        captured: Captured | None = None,
    ) -> None:
        self.model, self.report = model, report
        self.captured = captured
        """torch's graph that the model was translated from, if any."""
        self._library = library
        self.call_spec = call_spec
        """How arguments become inputs, and outputs results."""
        self._device, self._options = device, options
        self._runners: dict[bool, Runner] = {}
        self._lock = fork.Lock()

    @property
    def inputs(self) -> list[str]:
        """The names of the model's inputs."""
        return [str(x.name) for x in self.model.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        """The names of the model's outputs."""
        return [str(x.name) for x in self.model.graph.outputs]

    @property
    def library(self) -> Path | None:
        """The library that a session must register if the model has native kernels (`native=True`)."""
        return self._library

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in the engine, with the arguments and results of the module."""
        leaves = self.call_spec.leaves(args, kwargs)
        inputs = self.call_spec.feeds(leaves)
        outputs = self._runner(inputs)(inputs)
        for place, output in self.call_spec.mutated.items():
            with torch.no_grad():
                leaves[place].copy_(restore_result(output, outputs))
        return pytree.tree_unflatten(self.call_spec.binding.restore(outputs), self.call_spec.out_spec)

    def proto(self) -> onnx.ModelProto:
        """Return the model as protobuf, with its weights."""
        if weight_bytes(self.model) > LARGEST_PROTOBUF:
            raise SardonyxError(
                f"the weights have {weight_bytes(self.model) / 1e9:.1f} GB, more than the limit of protobuf, 2 GB",
                hint="program.save(path) writes them to a separate file",
            )
        return ir.to_proto(self.model)

    def save(self, path: str | os.PathLike[str], *, external_data: bool | None = None) -> Path:
        """Write the model; over 2 GB, or with `external_data=True`, its weights to `<path>.data`.

        Weights are written from torch's memory, one after the other. An existing file is replaced when the new one is
        complete. The library of a model with native kernels is copied next to it, for `model.onnx` as
        `model.kernels.so`. These lines load it:

            options = onnxruntime.SessionOptions()
            options.register_custom_ops_library("model.kernels.so")
            session = onnxruntime.InferenceSession("model.onnx", options)
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"the folder {path.parent} does not exist")
        if external_data is None:
            external_data = weight_bytes(self.model) > LARGEST_PROTOBUF
        data = path.name + ".data" if external_data else None
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            ir.save(self.model, Path(folder) / path.name, external_data=data)
            if self._library is not None:
                kernels = path.stem + ".kernels.so"
                shutil.copyfile(self._library, Path(folder) / kernels)
                os.replace(Path(folder) / kernels, path.parent / kernels)
            if data:
                os.replace(Path(folder) / data, path.parent / data)
            os.replace(Path(folder) / path.name, path)
        return path

    def _runner(self, inputs: Sequence[torch.Tensor]) -> Runner:
        """Return the session for a call; calls with an empty operand get another one, with guarded kernels."""
        empty = not all(x.numel() for x in inputs) or self._computes_empty(inputs)
        with self._lock:
            if empty not in self._runners:
                self._runners[empty] = self._load(empty)
            return self._runners[empty]

    def _computes_empty(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a kernel that has to be guarded gets an empty operand, as of `x[1:]` for one row."""
        if not self._computed_sizes:
            return False
        sizes = [size for x in inputs for size in x.shape]
        return not all(compute(sizes) for compute in self._computed_sizes)

    @cached_property
    def _computed_sizes(self) -> list[Callable[[Sequence[int]], int]]:
        """Functions of the inputs' sizes for those that may be zero."""
        dims = [dim for x in self.model.graph.inputs for dim in x.meta.get("dims") or x.shape or ()]
        read = {dim: size_at(place) for place, dim in enumerate(dims) if isinstance(dim, sympy.Symbol)}
        computed = [dim for dim in computed_sizes(self.model) if dim.free_symbols <= set(read)]
        return [function_of_sizes(python_of(dim, read)) for dim in computed]

    def _load(self, empty: bool = False) -> Runner:
        """Load a session over the weights in torch's memory."""
        engine = find_engine(self._options.engine)
        model = self.model.clone()
        fit_to_engine(model, engine, self._device, self._options, empty_sizes=empty)
        weights = extract_weights(model)
        serialized = ir.to_proto(model).SerializeToString()
        libraries = () if self._library is None else (str(self._library),)
        job = Job.of(
            serialized,
            model.graph,
            self._options,
            weights=weights,
            device=self._device,
            libraries=libraries,
            refit=refit,
        )
        return observed(job, artifacts.load(engine, job))

    def __repr__(self) -> str:
        return f"Program({', '.join(self.inputs)} → {', '.join(self.outputs)}; {self.report.nodes} nodes)"


def map_external_weights(model: ir.Model) -> ir.Model:
    """Memory-map the external weights of a model, so that it runs from any working directory."""
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _map_weight(value.const_value, name)
    return model


def _map_weight(external: ir.ExternalTensor, name: str) -> ir.TensorProtocol:
    try:
        array = external.numpy()
    except FileNotFoundError as error:
        raise SardonyxError(
            f"the weight {name!r} of the model is in {external.path}, which does not exist",
            hint="put the model and its data files in one folder",
        ) from error
    if external.dtype == ir.DataType.BFLOAT16:
        return TorchTensor(_tensor_over(array.view(np.uint16)).view(torch.bfloat16), name=name)
    if array.dtype.kind not in "biufc":
        return ir.Tensor(array, dtype=external.dtype, name=name)  # 8-bit floats and 4-bit types
    return TorchTensor(_tensor_over(array), name=name)


def _tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # mapped arrays are read-only
        return torch.from_numpy(array)
