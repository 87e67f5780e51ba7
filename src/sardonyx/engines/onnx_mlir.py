"""onnx-mlir: a compiler that makes a shared library of a model."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Set
from pathlib import Path

import onnx_ir as ir
import torch

from sardonyx import opsets
from sardonyx.engines.engine import Availability, Engine, Job
from sardonyx.engines.om_compiler import MODEL, build, find
from sardonyx.engines.om_library import CONSTANTS, OnnxMlirRunner
from sardonyx.errors import EngineError, SardonyxError
from sardonyx.options import Options

_LARGEST_MODEL = 2**30
"""Weights of more bytes than this are given to the compiler in a file beside the model: protobuf ends at 2 GiB."""


class OnnxMlir(Engine):
    """Compiles models to native code by onnx-mlir, and runs them on the CPU."""

    name = "onnx-mlir"

    def probe(self) -> Availability:
        """Whether a compiler is on PATH, or named by the environment; one that options name is seen when used."""
        try:
            return Availability(self.name, find(Options.of()).version)
        except SardonyxError as error:
            return Availability(self.name, None, error.what)

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """21: recent compilers know 22, those of a year before 21; newer ones they only warn of."""
        return opsets.CHANNEL_SCALES

    def identity(self, options: Options) -> str:
        """The compiler, its flags, and the kind of machine."""
        compiler = find(options)
        return "\n".join((compiler.identity(), platform.system(), platform.machine(), *compiler.settings.flags))

    def compile(self, job: Job, folder: Path) -> None:
        """Write the library, and the file of its constants where it has one."""
        _require_cpu(job)
        stem = _tag(job, self.identity(job.options))
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-", ignore_cleanup_errors=True) as place:
            _write(job, Path(place) / MODEL)
            library = build(find(job.options), Path(place), stem)
            for made in (library.with_name(stem + CONSTANTS), library):
                if made.exists():
                    _keep(made, folder)

    def load(self, job: Job, artifact: Path | None) -> OnnxMlirRunner:
        """Open the library."""
        _require_cpu(job)
        found = sorted(artifact.glob("*.so")) if artifact else []
        if len(found) != 1:
            raise EngineError(f"there are {len(found)} libraries in {artifact}, where compiling leaves one")
        return OnnxMlirRunner(job, found[0])


def _require_cpu(job: Job) -> None:
    if job.device.type != "cpu":
        raise EngineError(
            f"tensors are on {job.device}, and onnx-mlir computes on the CPU only",
            hint='move the model and its inputs to the CPU, or use engine="onnxruntime"',
        )


def _tag(job: Job, identity: str) -> str:
    """What the library's symbols and files end with, so that many models live in one process."""
    return "m" + hashlib.sha256(f"{job.digest()}\n{identity}".encode()).hexdigest()[:24]


def _write(job: Job, path: Path) -> None:
    size = sum(weight.nbytes for weight in job.weights.values())
    ir.save(job.whole(), path, external_data=f"{path.name}.data" if size > _LARGEST_MODEL else None)


def _keep(made: Path, folder: Path) -> None:
    """Take a file out of the build folder. One that a container wrote as another user is copied, to own it."""
    if made.stat().st_uid == os.geteuid():
        os.replace(made, folder / made.name)
    else:
        shutil.copyfile(made, folder / made.name)
