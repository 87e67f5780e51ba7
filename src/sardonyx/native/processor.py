"""Processors that a library is built for: its instruction sets, and whether this machine has them."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sardonyx.errors import OptionError
from sardonyx.toolchain import compiler

_INSTRUCTION_SETS = re.compile(
    r"pni|s?sse\w*|avx\w*|fma\w*|f16c|abm|bmi\d|amx\w*|popcnt|movbe|gfni|xop|asimd\w*|sve\w*|fphp|i8mm|bf16"
)
"""Names of /proc/cpuinfo for instruction sets that compilers use."""
_V2 = ("pni", "popcnt", "sse4_1", "sse4_2", "ssse3")
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", *_V2)
LEVELS = {
    "x86-64": (),
    "x86-64-v2": _V2,
    "x86-64-v3": _V3,
    "x86-64-v4": ("avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", *_V3),
}
"""Microarchitecture levels, by compiler name."""


@dataclass(frozen=True)
class Processor:
    """The processor a library is built for."""

    name: str
    """"native" for the build machine's processor, else one of `LEVELS`; "sm_90" for GPUs."""
    machine: str
    instructions: Sequence[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags."""
        return () if self.name == "native" else (f"-march={self.name}",)

    def missing(self) -> str | None:
        """Return what this machine lacks to run the library, or None."""
        if self.machine != platform.machine():
            return f"{self.machine}, and this machine is {platform.machine()}"
        if _GPU.fullmatch(self.name):
            local = compiler.gpu_architecture()
            older = local is not None and _generation(local) < _generation(self.name)
            return f"GPUs from {self.name} on, and this GPU is {local}" if older else None
        missing = sorted({*self.instructions} - _local_instructions())
        return f"a processor with {', '.join(missing)}, which this one lacks" if missing else None


_GPU = re.compile(r"sm_(\d{2,3})")


def _generation(architecture: str) -> int:
    match = _GPU.fullmatch(architecture)
    return int(match[1]) if match else 0


def gpu(name: str | None = None) -> Processor:
    """Return the local GPU, the default architecture without one, or the given architecture and later ones."""
    if name is not None and not _GPU.fullmatch(name):
        raise OptionError(f"processor is {name!r}", hint="omit it for this machine's GPU, or use for instance 'sm_90'")
    architecture = name or compiler.gpu_architecture() or compiler.DEFAULT_ARCHITECTURE
    return Processor(architecture, platform.machine(), [])


def processor(name: str | None = None) -> Processor:
    """Return this machine's processor, or a level, which this machine need not support."""
    if name is None:
        return Processor("native", platform.machine(), sorted(_local_instructions()))
    if name not in LEVELS or platform.machine() not in ("x86_64", "AMD64"):
        levels = ", ".join(LEVELS)
        raise OptionError(
            f"processor is {name!r}", hint=f"omit it for this machine's processor; on x86-64 use {levels}"
        )
    return Processor(name, platform.machine(), sorted(LEVELS[name]))


@cache
def _local_instructions() -> frozenset[str]:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset({platform.processor()})
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(word for word in (match[1] if match else "").split() if _INSTRUCTION_SETS.fullmatch(word))
