"""Native kernels: groups of a model's operators compiled to a library that ONNX Runtime loads."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx_ir as ir

from sardonyx.errors import OptionError, SardonyxError
from sardonyx.native.carve import Plan, plan
from sardonyx.native.compiling import Generated, compile, convert_graph, generate
from sardonyx.native.model import FolderError, NativeModel, load
from sardonyx.native.report import NativeReport
from sardonyx.native.select import scope
from sardonyx.native.session import onnxruntime, register
from sardonyx.options import Options
from sardonyx.toolchain import compiler

__all__ = [
    "FolderError",
    "Generated",
    "NativeModel",
    "NativeReport",
    "compile",
    "convert_graph",
    "generate",
    "load",
    "native",
    "scope",
]

log = logging.getLogger(__name__)


def takes_none(engine: str, device: str) -> OptionError:
    """The error about kernels that are asked for where an engine takes none."""
    return OptionError(
        f"native=True, and the engine {engine!r} takes no kernels on the device {device!r}",
        hint="native=False, or the engine 'onnxruntime' and a model on the CPU",
    )


_LEAST = 2**14
"""Elements that a kernel has to write before it is built without being asked for."""


def native(model: ir.Model, options: Options) -> Path | None:
    """Give a model kernels of its own, in place; the library they are in, or None where nothing is worth one.

    With `native="auto"` only large groups are, and a model whose kernels cannot be made, built or loaded, whatever the
    reason, is left as it is.
    """
    automatic = options.native == "auto"
    try:
        built = _built(model, options, least=_LEAST if automatic else 0)
    except Exception as error:
        if not automatic:
            raise
        _warn_once(str(error) if isinstance(error, SardonyxError) else f"{type(error).__name__}: {error}")
        return None
    if built is None:
        return None
    found, library = built
    log.info("%d native kernels", len(found.parts))
    found.splice()
    return library


def _built(model: ir.Model, options: Options, *, least: int) -> tuple[Plan, Path] | None:
    """What becomes kernels, and their library, which onnxruntime takes; the model is not changed yet."""
    compiler.find()
    found = plan(model, least=least)
    if not found.parts:
        return None
    library = compiler.build_library(found.source, options)
    register(onnxruntime().SessionOptions(), library)
    return found, library


_warned: set[str] = set()


def _warn_once(why: str) -> None:
    if why not in _warned:
        _warned.add(why)
        log.warning("no native kernels: %s", why)
