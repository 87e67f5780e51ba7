"""What an engine is: the one interface between a model and whatever runs it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx import dtypes, opsets
from sardonyx.options import Options
from sardonyx.telemetry.report import Choice
from sardonyx.translate.translator import WEIGHTS_LOCATION

T = TypeVar("T")


@dataclass(frozen=True)
class Availability:
    """Whether an engine can be used here: its version, or the reason why not."""

    name: str
    version: str | None
    reason: str = ""

    @property
    def installed(self) -> bool:
        """Whether the engine can be used."""
        return self.version is not None


@dataclass(frozen=True)
class Job:
    """A model ready to run: serialised, with the tensors its weights live in."""

    model: bytes
    weights: Mapping[str, torch.Tensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_types: tuple[torch.dtype, ...]
    output_shapes: tuple[tuple[int, ...] | None, ...]
    """The sizes of each output where all are known ahead."""
    fixed: frozenset[int]
    """Which inputs are weights: the same tensors on nearly every call."""
    device: torch.device
    stream: int | None
    """The accelerator's stream that the session runs on: torch's current one; None on the CPU."""
    options: Options
    libraries: tuple[str, ...] = ()
    """Shared libraries with operators of the model's own, for an engine that `takes_kernels`."""
    refit: Refit | None = None
    """Makes of a file's job one for another engine, where the engine is a choice of several."""

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
    ) -> Job:
        """A job for a serialised model with the inputs and outputs of `graph`, on torch's current stream."""
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
            stream=current_stream(device),
            options=options,
            libraries=tuple(libraries),
            refit=refit,
        )

    def whole(self) -> ir.Model:
        """The model with its weights, which stay in torch's memory until they are written."""
        model = ir.from_proto(onnx.load_from_string(self.model))
        for name, value in model.graph.initializers.items():
            held = value.const_value
            if isinstance(held, ir.ExternalTensor) and held.location == WEIGHTS_LOCATION:
                value.const_value = TorchTensor(self.weights[name].detach().cpu(), name=name)
        return model

    def digest(self) -> str:
        """What tells the model, every byte of its weights included, from any other."""
        hashed = hashlib.sha256(self.model)
        for name in sorted(self.weights):
            weight = self.weights[name].detach().cpu().contiguous()
            hashed.update(f"\0{name}\0{weight.dtype}\0{tuple(weight.shape)}\0".encode())
            if weight.numel():
                hashed.update(weight.view(-1).view(torch.uint8).numpy().data)
        return hashed.hexdigest()


Refit: TypeAlias = Callable[[Job, "Engine", Options], Job]


def static_sizes(value: ir.Value) -> tuple[int, ...] | None:
    """The sizes of a value, where all are known ahead."""
    dims = value.meta.get("dims", value.shape)
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        return None
    return tuple(int(dim) for dim in dims)


def current_stream(device: torch.device) -> int | None:
    """Which stream a session for this device runs on: torch's current one; None on the CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


class Runner(ABC):
    """A loaded model: torch tensors in, torch tensors out."""

    @abstractmethod
    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once; safe to call from several threads."""

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once, and leave the results in these tensors, which have the right sizes and types."""
        for given, result in zip(outputs, self(inputs), strict=True):
            given.copy_(result)

    def close(self) -> None:  # noqa: B027  # many hold nothing
        """Free what the engine holds."""


class Engine(ABC):
    """An engine: `probe` and `load` are needed, the rest has defaults for one that takes plain ONNX on the CPU."""

    name: str
    domains: frozenset[str] = frozenset()
    """Operator domains it knows beside ONNX's own."""
    custom_operators = False
    """Whether it loads the libraries of operators that `sardonyx.custom_op` declared."""
    takes_session_options = False
    """Whether it runs models in sessions of ONNX Runtime: they have levels of optimization, and can write profiles."""

    @abstractmethod
    def probe(self) -> Availability:
        """Whether it is installed, without loading more than needed to tell."""

    def local_domains(self, device: torch.device, operators: Set[str]) -> frozenset[str]:
        """Domains for a model of these ONNX operators that runs here and now, and is not kept: what works may change.

        What follows a slash is how operators of the domain want their operands: `com.microsoft.nchwc/16` takes channels
        in blocks of sixteen.
        """
        return frozenset()

    def kernels(self, device: torch.device) -> Any:
        """A `sardonyx.optimize.legalize.Kernels`: which operators it has for which dtypes; None if it has all."""
        return None

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """The newest opset it runs well on this device, for a graph of these torch operators."""
        return opsets.NEWEST

    def freezes(self, device: torch.device) -> bool:
        """Whether weights on this device had better be constants of the model than inputs."""
        return True

    def takes_kernels(self, device: torch.device) -> bool:
        """Whether it can load ONNX Runtime's kind of custom operators for this device."""
        return False

    def identity(self, options: Options) -> str | None:
        """What decides, beside the model, what `compile` writes: versions, the compiler, its flags.

        None for an engine that writes nothing: its models are made ready anew by each `load`.
        """
        return None

    def compile(self, job: Job, folder: Path) -> None:  # noqa: B027  # many compile nothing
        """Write into an empty folder what `load` will need; it is kept for other processes."""

    @abstractmethod
    def load(self, job: Job, artifact: Path | None) -> Runner:
        """Make the model ready to run, from what `compile` wrote where there is any.

        The folder may be gone once this returns: what is needed later has to be open by then.
        """


class EngineChoice(Engine):
    """An engine that chooses among others, with the arguments of the first call."""

    @abstractmethod
    def candidates(self, options: Options, device: torch.device | None = None) -> list[Engine]:
        """The engines to choose from, the preferred first."""

    @abstractmethod
    def options_for(self, engine: Engine, options: Options) -> Options:
        """The options with which a candidate is tried."""

    @abstractmethod
    def key(self, model: bytes, inputs: Sequence[Any], options: Options, device: torch.device) -> str:
        """What a choice holds for."""

    @abstractmethod
    def choose(
        self,
        key: str,
        contenders: Mapping[str, Callable[[], tuple[T, Callable[[], Sequence[Any]]]]],
        expected: Callable[[], Sequence[Any]] | None,
        options: Options,
    ) -> tuple[Choice, T]:
        """The choice, and what was prepared of its engine."""
