"""ONNX Runtime sessions for models with kernels and external weights."""

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
    """Return the package, or raise an error that says how to install it."""
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


def check_providers(providers: list[str]) -> list[str]:
    """Return the providers, or raise an error if the package lacks one."""
    for name in providers:
        if name not in onnxruntime().get_available_providers():
            raise MissingDependency(
                f"the kernels are for onnxruntime's {name}, which the installed onnxruntime lacks",
                hint='pip uninstall onnxruntime; pip install "sardonyx[gpu]"',
            )
    return providers


def register(options: Any, library: Path) -> None:
    """Register the operators of a library with session options."""
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:
        raise EngineError(
            f"onnxruntime cannot load the kernels in {library}: {error}",
            hint="they need onnxruntime 1.18 or later, and a folder on a mount without noexec",
        ) from error


def open_session(model: ir.Model, library: Path | None, options: Any = None, **kwargs: Any) -> Any:
    """Return an `onnxruntime.InferenceSession` of a model, with the library of its kernels registered."""
    ort = onnxruntime()
    options = ort.SessionOptions() if options is None else options
    kwargs.setdefault("providers", ["CPUExecutionProvider"])
    if library is not None:
        register(options, library)
    try:
        if not has_external_weights(model):
            return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            write_model(model, Path(folder, "model.onnx"))
            return ort.InferenceSession(str(Path(folder, "model.onnx")), options, **kwargs)
    except Exception as error:
        raise EngineError(f"onnxruntime rejected the model: {error}") from error


def write_model(model: ir.Model, path: Path) -> None:
    """Write a model, with external weights in a file next to it if there are any or they are too large."""
    external = f"{path.name}.data" if has_external_weights(model) else None
    ir.save(model.clone(), path, external_data=external)  # saving makes the model refer to the new file


def has_external_weights(model: ir.Model) -> bool:
    """Return whether weights are, or must be, external: ONNX Runtime finds those only next to the model."""
    external = any(isinstance(x.const_value, ir.ExternalTensor) for x in model.graph.initializers.values())
    return external or weight_bytes(model) > LARGEST_PROTOBUF
