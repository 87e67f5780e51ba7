"""The targets of kernels: how their source is generated and built, and which execution provider runs them."""

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
    """Generates the code of a region."""
    headers: Sequence[tuple[str, str]]
    """Headers at the start of its sources, as packages and file names."""
    provider: str
    """The execution provider of the kernels."""
    source: str
    """The file name of the source in a saved folder."""
    processor: Callable[[str | None], Processor]
    """Returns the processor of a name; of None, this machine's."""
    compiler_version: Callable[[], str]
    """Returns the compiler's version; an error if there is none."""
    build: Callable[[str, Options, Processor], Path]
    """Builds the library of a source."""

    @property
    def providers(self) -> list[str]:
        """The providers of a session: nodes without a kernel here run on the CPU."""
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
    """Return the target of a name."""
    if name not in TARGETS:
        raise OptionError(f"target is {name!r}", hint=f"use {' or '.join(map(repr, TARGETS))}")
    return TARGETS[name]
