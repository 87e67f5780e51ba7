"""The processors that a library is for: which instructions it may use, and whether this machine has them."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sardonyx.errors import OptionError
from sardonyx.toolchain import compiler

_COMPUTES = re.compile(
    r"pni|s?sse\w*|avx\w*|fma\w*|f16c|abm|bmi\d|amx\w*|popcnt|movbe|gfni|xop|asimd\w*|sve\w*|fphp|i8mm|bf16"
)
"""What the kernel calls abilities of a processor that compilers make use of."""
_V2 = ("pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", *_V2)
LEVELS = {
    "x86-64": (),
    "x86-64-v2": _V2,
    "x86-64-v3": _V3,
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", *_V3),
}
"""Processors of many machines, by the names compilers have for them."""


@dataclass(frozen=True)
class Processor:
    """What a library was built for."""

    name: str
    """"native" for the processor of the machine it was built on, else one of `LEVELS`; "sm_90" for GPUs."""
    machine: str
    instructions: Sequence[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """How a compiler is told."""
        return () if self.name == "native" else (f"-march={self.name}",)

    def lacking(self) -> str | None:
        """What this machine lacks to run it; None if it has everything."""
        if self.machine != platform.machine():
            return f"a processor of the kind {self.machine}, and this is {platform.machine()}"
        if _GPU.fullmatch(self.name):
            here = compiler.gpu_architecture()
            older = here is not None and _generation(here) < _generation(self.name)
            return f"GPUs from {self.name} on, and this is {here}" if older else None
        missing = sorted({*self.instructions} - _here())
        return f"a processor with {', '.join(missing)}, which this one lacks" if missing else None


_GPU = re.compile(r"sm_(\d{2,3})")


def _generation(architecture: str) -> int:
    found = _GPU.fullmatch(architecture)
    return int(found[1]) if found else 0


def gpu(name: str | None = None) -> Processor:
    """The GPU of this machine, or what nvcc builds for without one, or those of an architecture and later ones."""
    if name is not None and not _GPU.fullmatch(name):
        raise OptionError(f"processor is {name!r}", hint="leave it out for this machine's GPU, or use one as 'sm_90'")
    return Processor(compiler.nvcc(name).architecture, platform.machine(), [])


def processor(name: str | None = None) -> Processor:
    """The processor of this machine, or those of a level, which this machine need not be of."""
    if name is None:
        return Processor("native", platform.machine(), sorted(_here()))
    if name not in LEVELS or platform.machine() not in ("x86_64", "AMD64"):
        levels = ", ".join(LEVELS)
        raise OptionError(f"processor is {name!r}", hint=f"leave it out for this machine's; on x86-64 use {levels}")
    return Processor(name, platform.machine(), sorted(LEVELS[name]))


@cache
def _here() -> frozenset[str]:
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset({platform.processor()})
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", told, re.MULTILINE)
    return frozenset(word for word in (found[1] if found else "").split() if _COMPUTES.fullmatch(word))
