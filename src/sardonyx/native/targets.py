"""What kernels can be made for: how their source is written, and who of ONNX Runtime calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sardonyx.errors import OptionError
from sardonyx.native.cpp import Kernel
from sardonyx.native.cuda import CudaKernel
from sardonyx.native.processor import Processor, gpu, processor
from sardonyx.options import Options
from sardonyx.toolchain import compiler


@dataclass(frozen=True)
class Target:
    """A kind of processor."""

    name: str
    kernel: type[Kernel]
    """Writes a region."""
    headers: Sequence[tuple[str, str]]
    """What its sources begin with: packages, and files in them."""
    provider: str
    """The execution provider of ONNX Runtime whose operators the kernels are."""
    source: str
    """What the source is called in a folder."""
    processor: Callable[[str | None], Processor]
    """What a library is built for, by the name that users have for it; None for what this machine has."""
    compiler_version: Callable[[], str]
    """Of the compiler that builds it; an error if there is none."""
    build: Callable[[str, Options, Processor], Path]
    """Makes the library of a source."""

    @property
    def providers(self) -> list[str]:
        """Those that a session has: what is no kernel and has none here runs on the CPU."""
        return list(dict.fromkeys([self.provider, "CPUExecutionProvider"]))


def _headers(*names: str) -> list[tuple[str, str]]:
    return [("sardonyx.native", name) for name in names]


_ORT, _NARROW = ("sardonyx.toolchain", "ort.h"), ("sardonyx.toolchain", "narrow.h")

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "cpu",
            Kernel,
            [
                _ORT,
                _NARROW,
                *_headers("lanes.h", "arithmetic.h", "functions.h", "kernels.h", "products.h", "vectors.h"),
            ],
            "CPUExecutionProvider",
            "kernels.cpp",
            processor,
            lambda: compiler.find().version,
            lambda source, options, built_for: compiler.build_library(source, options, flags=built_for.flags),
        ),
        Target(
            "cuda",
            CudaKernel,
            [_ORT, *_headers("cuda.h", "arithmetic.h", "cuda_rows.h")],
            "CUDAExecutionProvider",
            "kernels.cu",
            gpu,
            lambda: compiler.nvcc().version,
            lambda source, options, gpu: compiler.build_cuda_library(source, options, architecture=gpu.name),
        ),
    )
}


def target_of(name: str) -> Target:
    """The target of a name."""
    if name not in TARGETS:
        raise OptionError(f"target is {name!r}", hint=f"use {' or '.join(map(repr, TARGETS))}")
    return TARGETS[name]
