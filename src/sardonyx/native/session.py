"""Sessions of ONNX Runtime for models that may have kernels, and weights in other files."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir

from sardonyx.errors import EngineError, MissingDependency
from sardonyx.model_files import LARGEST_PROTOBUF, weight_bytes


@cache
def onnxruntime() -> Any:
    """The package."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependency(
            f"a session needs the package onnxruntime ({error})",
            hint='pip install "sardonyx[cpu]", or "sardonyx[gpu]" for CUDA; never both',
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise MissingDependency(
            "onnxruntime is installed but broken, as happens when its CPU and GPU wheels overwrite each other",
            hint="pip uninstall onnxruntime onnxruntime-gpu, then install one of them",
        )
    return onnxruntime


def available(providers: list[str]) -> list[str]:
    """These providers, all of which the package has."""
    for name in providers:
        if name not in onnxruntime().get_available_providers():
            raise MissingDependency(
                f"the kernels are for onnxruntime's {name}, which this onnxruntime lacks",
                hint='pip uninstall onnxruntime; pip install "sardonyx[gpu]"',
            )
    return providers


def register(options: Any, library: Path) -> None:
    """Let sessions with these options have the operators of a library."""
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:
        raise EngineError(
            f"onnxruntime cannot load the kernels in {library}: {error}",
            hint="they need onnxruntime 1.18 or later, and a folder whose mount allows executables",
        ) from error


def open_session(model: ir.Model, library: Path | None, options: Any = None, **kwargs: Any) -> Any:
    """An `onnxruntime.InferenceSession` of a model, with the library registered that its kernels are in."""
    ort = onnxruntime()
    options = ort.SessionOptions() if options is None else options
    kwargs.setdefault("providers", ["CPUExecutionProvider"])
    if library is not None:
        register(options, library)
    try:
        if not has_weights_apart(model):
            return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            write(model, Path(folder, "model.onnx"))
            return ort.InferenceSession(str(Path(folder, "model.onnx")), options, **kwargs)
    except Exception as error:
        raise EngineError(f"onnxruntime refused the model: {error}") from error


def write(model: ir.Model, path: Path) -> None:
    """Write a model; one whose weights are in other files, or too large for its own, with a file for them beside it."""
    apart = f"{path.name}.data" if has_weights_apart(model) else None
    ir.save(model.clone(), path, external_data=apart)  # saving lets a model refer to the new file


def has_weights_apart(model: ir.Model) -> bool:
    """Whether weights of a model are, or have to be, in other files: ONNX Runtime finds these only beside the model."""
    apart = any(isinstance(x.const_value, ir.ExternalTensor) for x in model.graph.initializers.values())
    return apart or weight_bytes(model) > LARGEST_PROTOBUF
