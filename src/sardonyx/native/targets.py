"""The targets of kernels: how their source is generated and built, and which execution provider runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from sardonyx.errors import OptionError
from sardonyx.native.cpp import Kernel
from sardonyx.native.cuda import DEVICE_CODE, HOST_CODE, CudaKernel
from sardonyx.native.processor import Processor, gpu, processor
from sardonyx.native.table import NARROW
from sardonyx.options import Options
from sardonyx.toolchain import compiler, nvrtc


@dataclass(frozen=True)
class Target:
    """A kind of processor."""

    name: str
    kernel: type[Kernel]
    """Generates the code of a region."""
    headers: Sequence[tuple[str, str, str]]
    """Headers at the start of its sources, as preprocessor conditions, packages and file names."""
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
    min_elements: int
    """Elements that a kernel must write to be built with native="auto"."""
    slow_seconds: Mapping[str, float]
    """Operators whose own kernels are slow: seconds that one of ours saves per element, for a single node too."""
    is_left: Callable[[ir.Node], bool] = lambda node: False
    """Whether the provider computes a node as well or better: a selection by "auto" leaves it."""
    host_code: str = ""
    """The preprocessor condition of code that runs on the CPU, in sources with code for both."""

    @property
    def providers(self) -> list[str]:
        """The providers of a session: nodes without a kernel here run on the CPU."""
        return list(dict.fromkeys([self.provider, "CPUExecutionProvider"]))


def guarded(condition: str, code: str) -> str:
    """Return code that is compiled on a condition of the preprocessor, if there is one."""
    return f"#{condition}\n{code}\n#endif" if condition else code


def _headers(*names: str, condition: str = "", package: str = "sardonyx.native") -> list[tuple[str, str, str]]:
    return [(condition, package, name) for name in names]


_TOOLCHAIN = "sardonyx.toolchain"
_LEFT_ON_CUDA = frozenset({"EmbedLayerNormalization", "AveragePool", "MaxPool", "Range"})
"""Range has operands on the CPU."""
_NORMS_OF_SUMS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})


def _is_left_on_cuda(node: ir.Node) -> bool:
    """Return whether ONNX Runtime's kernel is as good: its norms of sums round the sum to half precision first.

    That makes the error of BERT 1.4e-3 instead of 1.05e-3; the norms take 2.7 µs of 1024 × 768 elements, and ours 3.6.
    """
    is_exact = node.op_type in _NORMS_OF_SUMS and node.outputs[0].dtype not in NARROW
    return node.op_type in _LEFT_ON_CUDA or is_exact


_SLOW_ON_CPU = {"SkipLayerNormalization": 4e-9, "SkipSimplifiedLayerNormalization": 4e-9}
"""Computed element by element."""
_SLOW_ON_CUDA = {
    "BiasGelu": 1e-12,
    "FastGelu": 1e-12,
    "Gelu": 2e-12,
    "QuickGelu": 2e-12,
    "LayerNormalization": 7e-12,
    **dict.fromkeys(_NORMS_OF_SUMS, 1e-12),  # ours is more exact, though no faster
    "RotaryEmbedding": 4e-12,
    "Pad": 6e-12,
}
"""From kernel times on an H200 in float16: BiasGelu of 1024 × 3072 takes 6 µs, and the memory it moves 3 µs."""

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        Target(
            "cpu",
            Kernel,
            [
                *_headers("ort.h", "narrow.h", package=_TOOLCHAIN),
                *_headers("lanes.h", "arithmetic.h", "functions.h", "kernels.h", "products.h", "vectors.h"),
            ],
            "CPUExecutionProvider",
            "kernels.cpp",
            processor,
            lambda: compiler.find().version,
            lambda source, options, built_for: compiler.build_library(source, options, flags=built_for.flags),
            min_elements=2**14,
            slow_seconds=_SLOW_ON_CPU,
        ),
        Target(
            "cuda",
            CudaKernel,
            [
                *_headers("cuda_call.h"),
                *_headers("cuda_ptx.h", "cuda.h", "arithmetic.h", "cuda_rows.h", condition=DEVICE_CODE),
                *_headers("ort.h", condition=HOST_CODE, package=_TOOLCHAIN),
                *_headers("cuda_launch.h", condition=HOST_CODE),
            ],
            "CUDAExecutionProvider",
            "kernels.cu",
            gpu,
            lambda: f"{nvrtc.find().version}, {compiler.find().version}",
            lambda source, options, gpu: compiler.build_cuda_library(source, options, architecture=gpu.name),
            min_elements=2**10,  # a launch costs as much as a pass over a megabyte
            slow_seconds=_SLOW_ON_CUDA,
            is_left=_is_left_on_cuda,
            host_code=HOST_CODE,
        ),
    )
}


def target_for(device: str) -> Target:
    """Return the target of kernels for tensors on a device, by its type in torch."""
    return TARGETS["cuda" if device == "cuda" else "cpu"]


def target_of(name: str) -> Target:
    """Return the target of a name."""
    if name not in TARGETS:
        raise OptionError(f"target is {name!r}", hint=f"use {' or '.join(map(repr, TARGETS))}")
    return TARGETS[name]
