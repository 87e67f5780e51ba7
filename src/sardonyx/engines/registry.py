"""The engine interface, and which engines there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from sardonyx.errors import OptionError
from sardonyx.options import Options


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


class Runner(Protocol):
    """A loaded model: torch tensors in, torch tensors out."""

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once; safe to call from several threads."""

    def close(self) -> None:
        """Free what the engine holds."""


class Engine(Protocol):
    """What an engine must offer."""

    name: str
    domains: frozenset[str]
    """Operator domains it knows beside ONNX's own."""

    def local_domains(self, device: torch.device, operators: Set[str]) -> frozenset[str]:
        """Domains for a model of these ONNX operators that runs here and now, and is not kept: what works may change.

        What follows a slash is how operators of the domain want their operands: `com.microsoft.nchwc/16` takes channels
        in blocks of sixteen.
        """

    def probe(self) -> Availability:
        """Whether it is installed, without loading more than needed to tell."""

    def kernels(self, device: torch.device) -> Any:
        """A `sardonyx.optimize.legalize.Kernels`: which operators it has for which dtypes; None if it has all."""

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """The newest opset it runs well on this device, for a graph of these torch operators."""

    def freezes(self, device: torch.device) -> bool:
        """Whether weights on this device had better be constants of the model than inputs."""

    def load(self, job: Job) -> Runner:
        """Make the model ready to run."""


_ENGINES = {
    "onnxruntime": "sardonyx.engines.onnxruntime:OnnxRuntime",
    "reference": "sardonyx.engines.reference:Reference",
}


def find(name: str) -> Engine:
    """The engine of that name."""
    if name not in _ENGINES:
        raise OptionError(f"unknown engine {name!r}", hint="known engines: " + ", ".join(_ENGINES))
    module, _, attribute = _ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)()
    return engine


def engines() -> list[Availability]:
    """Every known engine: installed or not, its version, and the reason.

    >>> [engine.name for engine in engines()]
    ['onnxruntime', 'reference']
    """
    return [find(name).probe() for name in _ENGINES]
