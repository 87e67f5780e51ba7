"""The engine onnx-mlir: compiles a model to a shared library."""

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
from sardonyx.engines.onnx_mlir_compiler import MODEL, find_compiler, run_compiler
from sardonyx.engines.onnx_mlir_library import CONSTANTS, OnnxMlirRunner
from sardonyx.errors import EngineError, SardonyxError
from sardonyx.options import Options

_LARGEST_MODEL = 2**30
"""Weights larger than this, in bytes, go to the compiler in an external file: protobuf is limited to 2 GiB."""


class OnnxMlir(Engine):
    """Compiles models to native code with onnx-mlir, and runs them on the CPU."""

    name = "onnx-mlir"

    def probe(self) -> Availability:
        """Whether a compiler is on PATH or set by the environment; one set by options is checked when used."""
        try:
            return Availability(self.name, find_compiler(Options.of()).version)
        except SardonyxError as error:
            return Availability(self.name, None, error.what)

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """Return 21: recent compilers support 22, those a year older 21, and for newer opsets they only warn."""
        return opsets.CHANNEL_SCALES

    def identity(self, options: Options) -> str:
        """Return the compiler, its flags, and the kind of machine."""
        compiler = find_compiler(options)
        return "\n".join((compiler.identity(), platform.system(), platform.machine(), *compiler.settings.flags))

    def compile(self, job: Job, folder: Path) -> None:
        """Write the library, and the file of its constants if there is one."""
        _require_cpu(job)
        stem = _tag(job, self.identity(job.options))
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-", ignore_cleanup_errors=True) as scratch:
            _write(job, Path(scratch) / MODEL)
            library = run_compiler(find_compiler(job.options), Path(scratch), stem)
            for file in (library.with_name(stem + CONSTANTS), library):
                if file.exists():
                    _move_file(file, folder)

    def load(self, job: Job, artifact: Path | None) -> OnnxMlirRunner:
        """Load the library."""
        _require_cpu(job)
        libraries = sorted(artifact.glob("*.so")) if artifact else []
        if len(libraries) != 1:
            raise EngineError(f"{artifact} has {len(libraries)} libraries, expected one")
        return OnnxMlirRunner(job, libraries[0])


def _require_cpu(job: Job) -> None:
    if job.device.type != "cpu":
        raise EngineError(
            f"tensors are on {job.device}, but onnx-mlir runs on the CPU only",
            hint='move the model and its inputs to the CPU, or use engine="onnxruntime"',
        )


def _tag(job: Job, identity: str) -> str:
    """Return the suffix of the library's symbols and files, which must be unique within a process."""
    return "m" + hashlib.sha256(f"{job.digest()}\n{identity}".encode()).hexdigest()[:24]


def _write(job: Job, path: Path) -> None:
    size = sum(weight.nbytes for weight in job.weights.values())
    ir.save(job.whole(), path, external_data=f"{path.name}.data" if size > _LARGEST_MODEL else None)


def _move_file(file: Path, folder: Path) -> None:
    """Move a file out of the build folder. One that a container wrote as another user is copied, to own it."""
    if file.stat().st_uid == os.geteuid():
        os.replace(file, folder / file.name)
    else:
        shutil.copyfile(file, folder / file.name)
