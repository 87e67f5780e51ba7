"""Kernels for a GPU, run without one: their source built as plain C++, under an imitation of CUDA.

`python -m tests.native.cuda_on_cpu --graphs 2000` runs many random graphs, and all node tests of onnx; `--gpu` does so
on a GPU after all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import onnxruntime

from sardonyx import Options
from sardonyx.native.partition import Library
from sardonyx.native.targets import TARGETS
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header
from tests.native import node_tests, random
from tests.native.running import Together, session_of

_IMITATION = Path(__file__).with_name("cuda_on_cpu.h")


def built(source: str, *, threads: int) -> Path:
    """The library of a source for GPUs, for the CPU; blocks have so many threads at most."""
    narrow, instructions = read_header("sardonyx.toolchain", "narrow.h"), read_header("sardonyx.native", "cuda_ptx.h")
    assert instructions in source
    imitation = _IMITATION.read_text().replace('#include "narrow.h"\n', narrow)
    plain = source.replace(instructions, "").replace('"CUDAExecutionProvider"', '"CPUExecutionProvider"')
    plain = f"#define SARDONYX_DEVICE\n#define SARDONYX_MOST_THREADS {threads}\n{imitation}\n{plain}"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("kernels.cubin", "kernels.ptx"):
            Path(folder, name).write_text("none")
        flags = ("-O0", "-w", "-fno-strict-aliasing", "-pthread", f"-I{folder}")
        with mock.patch.object(compiler, "FLAGS", ("-std=c++17", "-fwrapv", "-fvisibility=hidden", "-fPIC")):
            return compiler.build_library(plain, Options.of({"cache_dir": ""}), flags=flags)


@dataclass
class OnCpu(Together):
    """Models whose kernels are for a GPU, and run on the CPU."""

    library: Library = field(default_factory=lambda: Library(TARGETS["cuda"]))
    threads: int = 1

    def build(self, *, quickly: bool = False) -> Path:
        self._built = built(self.library.source, threads=self.threads)
        for found in self._plans.values():
            found.splice()
        return self._built


@dataclass
class OnGpu(Together):
    """Models whose kernels are for a GPU, and run there."""

    library: Library = field(default_factory=lambda: Library(TARGETS["cuda"]))

    def build(self, *, quickly: bool = False) -> Path:
        target = TARGETS["cuda"]
        self._built = target.build(self.library.source, Options.of({"cache_dir": ""}), target.processor(None))
        for found in self._plans.values():
            found.splice()
        return self._built

    def session(self, name: str, *, threads: int = 1) -> onnxruntime.InferenceSession:
        return session_of(self.model(name), library=self._built, providers=TARGETS["cuda"].providers)


@contextmanager
def imitated(threads: int) -> Iterator[None]:
    """Where kernels of node tests and random graphs are those for a GPU, with so many threads; 0 for on a GPU."""

    def together() -> Together:
        return OnCpu(threads=threads) if threads else OnGpu()

    with mock.patch.object(random, "Together", together), mock.patch.object(node_tests, "Together", together):
        yield


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="the first batch of 50")
    parser.add_argument("--threads", type=int, default=1, help="threads of a block (default: 1)")
    parser.add_argument("--gpu", action="store_const", const=0, dest="threads", help="on a GPU")
    parser.add_argument("--skip-nodes", action="store_true", help="random graphs only")
    chosen = parser.parse_args(given)
    failed = 0
    with imitated(chosen.threads):
        for number in range(chosen.first, chosen.first + -(-chosen.graphs // 50)):
            outcome, smallest = random.batch(number, min(50, chosen.graphs))
            print(f"{number}: {outcome}", *outcome.failures.values(), smallest, sep="\n  ", flush=True)
            failed |= bool(outcome.failures)
        return failed if chosen.skip_nodes else failed | node_tests.main()


if __name__ == "__main__":
    sys.exit(main())
