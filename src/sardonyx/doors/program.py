"""An exported model: ONNX, with weights that stay in torch's memory until they are written, and callable as before."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch.utils import _pytree as pytree

from sardonyx import fork
from sardonyx.capture.conditions import Condition, sizes_of
from sardonyx.capture.export import Captured
from sardonyx.capture.regions import Result
from sardonyx.doors.call_arguments import Argument, arrangement_difference
from sardonyx.engines import Job, Runner, artifacts
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import SardonyxError
from sardonyx.options import Options
from sardonyx.pipeline import fit_to_engine, refit
from sardonyx.run.binding import Binding, restored
from sardonyx.telemetry.report import Report, observed
from sardonyx.translate.translator import external_weight

_LARGEST_PROTOBUF = 2**31 - 2**24
"""Protobuf refuses messages of 2 GiB; some room is left for the graph beside the weights."""


@dataclass(frozen=True)
class Calling:
    """How a module's arguments become the model's inputs, and the model's outputs the module's results."""

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    names: Sequence[str]
    """The names of the arguments."""
    arguments: Sequence[Argument]
    """The flattened arguments."""
    binding: Binding
    """Which flattened argument each input of the model is, and how each flattened result is made of its outputs."""
    mutated: Mapping[int, Result] = field(default_factory=dict)
    """For each flattened argument that the module edits in place, the output that has the new value."""
    conditions: Sequence[Condition] = ()
    """What was assumed of sizes and numbers."""

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The model's inputs, from arguments that are arranged as those it was exported with."""
        return self.feeds(self.leaves(args, kwargs))

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The flattened arguments, if they are arranged as those that the model was exported with."""
        named = self.in_spec.children()[1].context
        if set(kwargs) != set(named) or len(args) != self.in_spec.children()[0].num_children:
            raise TypeError(
                f"the model was exported for {self.in_spec.children()[0].num_children} positional arguments and the "
                f"keywords {list(named)}, and is called with {len(args)} and {list(kwargs)}"
            )
        call = tuple(args), {name: kwargs[name] for name in named}
        leaves, spec = pytree.tree_flatten(call)
        if spec != self.in_spec:
            raise TypeError(f"{arrangement_difference(self.names, call, self.in_spec)}; export it again for that")
        return leaves

    def feeds(self, leaves: Sequence[Any]) -> list[Any]:
        """The model's inputs, from flattened arguments; an error names what differs from the example."""
        fed = [argument.feed(leaf) for argument, leaf in zip(self.arguments, leaves, strict=True)]
        numbers = [size for leaf in leaves for size in sizes_of(leaf)] if self.conditions else []
        for condition in self.conditions:
            condition.check(numbers)
        return self.binding.feeds(fed)


class Program:
    """What `sardonyx.export` returns.

    >>> import sardonyx
    >>> program = sardonyx.export(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),))
    >>> program(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        model: ir.Model,
        calling: Calling,
        device: torch.device,
        options: Options,
        report: Report,
        library: Path | None = None,
        captured: Captured | None = None,
    ) -> None:
        self.model, self.report = model, report
        self.captured = captured
        """torch's graph that the model was made of, if it was."""
        self._library = library
        self.calling = calling
        """How its arguments become the model's inputs, and the model's outputs its results."""
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
        """The library that a session needs to register where the model has kernels of its own, as by `native=True`."""
        return self._library

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in the engine, with arguments and results as the module has them."""
        leaves = self.calling.leaves(args, kwargs)
        inputs = self.calling.feeds(leaves)
        outputs = self._runner(inputs)(inputs)
        for place, output in self.calling.mutated.items():
            with torch.no_grad():
                leaves[place].copy_(restored(output, outputs))
        return pytree.tree_unflatten(self.calling.binding.restore(outputs), self.calling.out_spec)

    def proto(self) -> onnx.ModelProto:
        """The model as protobuf, weights inside."""
        if self._weight_bytes() > _LARGEST_PROTOBUF:
            raise SardonyxError(
                f"the weights have {self._weight_bytes() / 1e9:.1f} GB, more than protobuf holds",
                hint="program.save(path) writes them to a file beside the model",
            )
        return ir.to_proto(self.model)

    def save(self, path: str | os.PathLike[str], *, external_data: bool | None = None) -> Path:
        """Write the model; over 2 GB, or if asked, its weights into `<path>.data` beside it.

        Weights are written from torch's memory, one after the other. A file that exists is replaced once the new one
        is complete. The library of a model with kernels of its own is copied beside it, for `model.onnx` as
        `model.kernels.so`. Then these lines load it:

            options = onnxruntime.SessionOptions()
            options.register_custom_ops_library("model.kernels.so")
            session = onnxruntime.InferenceSession("model.onnx", options)
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent}")
        if external_data is None:
            external_data = self._weight_bytes() > _LARGEST_PROTOBUF
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

    def _weight_bytes(self) -> int:
        held = (value.const_value for value in self.model.graph.initializers.values())
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def _runner(self, inputs: Sequence[torch.Tensor]) -> Runner:
        """The session for a call: another one where an input has no elements, which some kernels must not see."""
        empty = not all(x.numel() for x in inputs)
        with self._lock:
            if empty not in self._runners:
                self._runners[empty] = self._load(empty)
            return self._runners[empty]

    def _load(self, empty: bool = False) -> Runner:
        """A runner over the weights in torch's memory."""
        engine = find_engine(self._options.engine)
        model = self.model.clone()
        fit_to_engine(model, engine, self._device, self._options, empty_sizes=empty)
        weights = _leave_in_torch(model)
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


def hold(model: ir.Model) -> ir.Model:
    """Map the weights of a model that are in files of their own into memory: it then runs wherever it is called."""
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value = _mapped(value.const_value, name)
    return model


def _mapped(held: ir.ExternalTensor, name: str) -> ir.TensorProtocol:
    try:
        array = held.numpy()
    except FileNotFoundError as error:
        raise SardonyxError(
            f"the model has its weight {name!r} in {held.path}, which does not exist",
            hint="keep the files of a model in one folder",
        ) from error
    if held.dtype == ir.DataType.BFLOAT16:
        return TorchTensor(_over(array.view(np.uint16)).view(torch.bfloat16), name=name)
    if array.dtype.kind not in "biufc":
        return ir.Tensor(array, dtype=held.dtype, name=name)  # floats of a byte, and integers of half a one
    return TorchTensor(_over(array), name=name)


def _over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nobody writes to a file that is mapped
        return torch.from_numpy(array)


def _leave_in_torch(model: ir.Model) -> dict[str, torch.Tensor]:
    """Take the bytes of weights out of the model; the tensors they are in, by name."""
    weights = {}
    for name, value in model.graph.initializers.items():
        held = value.const_value
        if not isinstance(held, (TorchTensor, ir.LazyTensor)) or not held.size:
            continue
        tensor = held.raw.detach() if isinstance(held, TorchTensor) else torch.from_numpy(held.numpy())
        weights[name] = tensor.contiguous()
        value.const_value = external_weight(name, held.dtype, tuple(tensor.shape))
    return weights
