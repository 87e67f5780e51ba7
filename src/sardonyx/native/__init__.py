"""Native kernels: groups of a model's nodes compiled to a library of ONNX Runtime custom operators."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir

from sardonyx.errors import OptionError, SardonyxError
from sardonyx.native import cuda_products
from sardonyx.native.compile_model import Generated, compile, convert_graph, generate
from sardonyx.native.model import FolderError, NativeModel, load
from sardonyx.native.partition import KernelPlan, Library, plan_kernels
from sardonyx.native.report import NativeReport
from sardonyx.native.select import scope
from sardonyx.native.session import onnxruntime, register
from sardonyx.native.targets import Target, target_for
from sardonyx.options import Options

__all__ = [
    "FolderError",
    "Generated",
    "NativeModel",
    "NativeReport",
    "compile",
    "convert_graph",
    "cuda_matrix_products",
    "generate",
    "load",
    "native",
    "scope",
]

log = logging.getLogger(__name__)


def unsupported_error(engine: str, device: str) -> OptionError:
    """Return the error for native=True with an engine that does not support kernels."""
    return OptionError(
        f"native=True, and the engine {engine!r} supports no kernels on the device {device!r}",
        hint="use native=False, or the engine 'onnxruntime' and a model on the CPU or a CUDA GPU",
    )


def native(model: ir.Model, options: Options, device: str = "cpu") -> Path | None:
    """Replace nodes of a model by kernels, in place; return their library, or None if no kernel is worth it.

    `device` is the type of the device that the model runs on. With `native="auto"` only large groups are replaced, and
    any failure to generate, build or load kernels leaves the model unchanged.
    """
    automatic = options.native == "auto"
    result = _attempt(lambda: _build(model, options, target_for(device), automatic=automatic), options)
    if result is None:
        return None
    plan, library = result
    log.info("%d native kernels", len(plan.parts))
    plan.splice()
    return library


def cuda_matrix_products(model: ir.Model, options: Options) -> Path | None:
    """Replace matrix products of a model on CUDA, in place; return their library, or None as `native` does."""
    return _attempt(lambda: cuda_products.use_cuda_products(model, options), options)


_T = TypeVar("_T")


def _attempt(build: Callable[[], _T | None], options: Options) -> _T | None:
    """Return what `build` returns; None with a warning if it fails and kernels were not requested."""
    try:
        return build()
    except Exception as error:
        if options.native != "auto":
            raise
        _warn_once(str(error) if isinstance(error, SardonyxError) else f"{type(error).__name__}: {error}")
        return None


def _build(model: ir.Model, options: Options, target: Target, *, automatic: bool) -> tuple[KernelPlan, Path] | None:
    """Return the planned kernels and their library, checked to load; the model is not changed."""
    target.compiler_version()  # an error without a compiler
    plan = plan_kernels(model, min_elements=target.min_elements if automatic else 0, library=Library(target))
    if not plan.parts:
        return None
    library = target.build(plan.source, options, target.processor(None))
    register(onnxruntime().SessionOptions(), library)
    return plan, library


_warned: set[str] = set()


def _warn_once(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        log.warning("no native kernels: %s", reason)
