"""The interface of engines: what loads and runs an ONNX model."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx import dtypes, opsets
from sardonyx.options import Options
from sardonyx.telemetry.report import Choice, Recordings
from sardonyx.translate.translator import WEIGHTS_LOCATION

T = TypeVar("T")


@dataclass(frozen=True)
class Availability:
    """Whether an engine is installed: its version, or the reason why it cannot be used."""

    name: str
    version: str | None
    reason: str = ""

    @property
    def installed(self) -> bool:
        """Whether the engine can be used."""
        return self.version is not None


@dataclass(frozen=True)
class Job:
    """A serialized model to load, with the tensors of its weights."""

    model: bytes
    weights: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_types: tuple[torch.dtype, ...]
    output_shapes: tuple[tuple[int, ...] | None, ...]
    """The shape of each output; None if a size is not known before the call."""
    fixed: frozenset[int]
    """Indices of the inputs that are weights: the same tensors at nearly every call."""
    device: torch.device
    options: Options
    libraries: tuple[str, ...] = ()
    """Shared libraries with the model's native kernels, for an engine that `takes_kernels`."""
    refit: Refit | None = None
    """Makes of a file's job one for another engine; used by an engine that chooses among others."""
    records: bool = True
    """Whether CUDA graphs may be recorded."""

    @classmethod
    def of(
        cls,
        model: bytes,
        graph: ir.Graph,
        options: Options,
        *,
        weights: Mapping[str, torch.Tensor] | None = None,
        fixed: frozenset[int] = frozenset(),
        device: torch.device | None = None,
        libraries: Sequence[str] = (),
        refit: Refit | None = None,
        records: bool = True,
    ) -> Job:
        """Return a job for a serialized model with the inputs and outputs of `graph`."""
        device = device or torch.device("cpu")
        return cls(
            model=model,
            weights=weights or {},
            inputs=tuple(str(x.name) for x in graph.inputs),
            outputs=tuple(str(x.name) for x in graph.outputs),
            output_types=tuple(dtypes.to_torch(x.dtype) for x in graph.outputs if x.dtype is not None),
            output_shapes=tuple(map(static_sizes, graph.outputs)),
            fixed=fixed,
            device=device,
            options=options,
            libraries=tuple(libraries),
            refit=refit,
            records=records,
        )

    def whole(self) -> ir.Model:
        """Return the model with its weights, which share torch's memory until they are written."""
        model = ir.from_proto(onnx.load_from_string(self.model))
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.location == WEIGHTS_LOCATION:
                value.const_value = TorchTensor(self.weights[name].detach().cpu(), name=name)
        return model

    def digest(self) -> str:
        """Return the hash of the model and of every byte of its weights."""
        hashed = hashlib.sha256(self.model)
        for name in sorted(self.weights):
            weight = self.weights[name].detach().cpu().contiguous()
            hashed.update(f"\0{name}\0{weight.dtype}\0{tuple(weight.shape)}\0".encode())
            if weight.numel():
                hashed.update(weight.view(-1).view(torch.uint8).numpy().data)
        return hashed.hexdigest()


Refit: TypeAlias = Callable[[Job, "Engine", Options], Job]


def static_sizes(value: ir.Value) -> tuple[int, ...] | None:
    """Return the sizes of a value, or None if some are symbolic."""
    dims = value.meta.get("dims", value.shape)
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        return None
    return tuple(int(dim) for dim in dims)


class Runner(ABC):
    """A loaded model: torch tensors in, torch tensors out."""

    recordings: Recordings | None = None
    """What is known of its CUDA graphs; None if it records none."""
    placement: Mapping[str, Counter[str]] = MappingProxyType({})
    """Operators by execution provider, on a GPU."""

    @abstractmethod
    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once; safe to call from several threads."""

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once and store the results in these tensors, which have the right shapes and dtypes."""
        for output, result in zip(outputs, self(inputs), strict=True):
            output.copy_(result)

    def append(self, inputs: Sequence[torch.Tensor | int], memory: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Run once, with some outputs stored in tensors that are inputs as well, in place if the engine can."""
        outputs = self(inputs)
        for index, tensor in memory.items():
            outputs[index] = tensor.copy_(outputs[index])
        return outputs

    def close(self) -> None:  # noqa: B027  # many engines hold no resources
        """Free the engine's resources."""


class Engine(ABC):
    """An engine must define `probe` and `load`; the rest has defaults for one that runs plain ONNX on the CPU."""

    name: str
    domains: frozenset[str] = frozenset()
    """Operator domains it supports besides ONNX's own."""
    custom_operators = False
    """Whether it loads the libraries of operators declared by `sardonyx.custom_op`."""
    takes_session_options = False
    """Whether it runs models in ONNX Runtime sessions, which have optimization levels and can write profiles."""
    takes_quantized_layers = False
    """Whether models `in_precision` "int8" are given to it with QuantizeLinear and DequantizeLinear around layers."""

    @abstractmethod
    def probe(self) -> Availability:
        """Whether it is installed, determined without loading more than necessary."""

    def local_domains(self, device: torch.device, operators: Set[str], *, training: bool = False) -> frozenset[str]:
        """Return domains for a model of these ONNX operators that runs on this machine only and is not saved.

        What follows a slash says which kernels: `com.microsoft.nchwc/16` has channels in blocks of sixteen,
        `com.microsoft/cuda` are kernels that are faster on CUDA, and with `/channels_last` those for that layout.
        `channels_last` alone is no domain: it lets Transposes from channels last move towards the outputs.
        """
        return frozenset()

    def kernels(self, device: torch.device) -> Any:
        """Return a `sardonyx.optimize.legalize.Kernels`: its operators and their dtypes; None if it has all."""
        return None

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """Return the newest opset that it runs well on this device, for a graph of these torch operators."""
        return opsets.NEWEST

    def freezes(self, device: torch.device) -> bool:
        """Whether weights on this device should be constants of the model rather than inputs."""
        return True

    def takes_kernels(self, device: torch.device) -> bool:
        """Whether it can load ONNX Runtime custom operators for this device."""
        return False

    def appends_in_place(self, device: torch.device) -> bool:
        """Whether it has GroupQueryAttention, which appends to keys and values in place if its runner is told to."""
        return False

    def in_precision(self, precision: str, options: Options) -> Options | None:
        """Return options with which it computes a whole float32 model in a lower precision; None if it does not.

        One that `takes_quantized_layers` computes these in "int8", and with the same options what is between them.
        """
        return None

    def identity(self, options: Options) -> str | None:
        """Return what determines, besides the model, what `compile` writes: versions, the compiler, its flags.

        None for an engine that compiles nothing: each `load` then starts from the model.
        """
        return None

    def compile(self, job: Job, folder: Path) -> None:  # noqa: B027  # many compile nothing
        """Write into an empty folder what `load` will need; the disk cache stores it for other processes."""

    @abstractmethod
    def load(self, job: Job, artifact: Path | None) -> Runner:
        """Load the model, from what `compile` wrote if anything.

        The folder may be deleted once this returns: open before then what is needed later.
        """


class EngineChoice(Engine):
    """An engine that chooses among others with the arguments of the first call."""

    @abstractmethod
    def candidates(self, options: Options, device: torch.device | None = None) -> list[Engine]:
        """Return the engines to choose from, preferred first."""

    @abstractmethod
    def options_for(self, engine: Engine, options: Options) -> Options:
        """Return the options for trying a candidate."""

    @abstractmethod
    def key(self, model: bytes, inputs: Sequence[Any], options: Options, device: torch.device) -> str:
        """Return the key under which a choice is cached."""

    @abstractmethod
    def choose(
        self,
        key: str,
        contenders: Mapping[str, Callable[[], tuple[T, Callable[[], Sequence[Any]]]]],
        expected: Callable[[], Sequence[Any]] | None,
        options: Options,
        agree: Callable[[Sequence[Any], Sequence[Any]], bool] | None = None,
    ) -> tuple[Choice, T]:
        """Return the choice, and what the chosen engine's contender returned.

        `agree` tells whether results are near enough to the expected ones; by default they are of the same precision.
        """
