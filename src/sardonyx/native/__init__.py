"""Native kernels: groups of a model's operators compiled to a library that ONNX Runtime loads."""

from __future__ import annotations

import logging
from pathlib import Path

import onnx_ir as ir

from sardonyx.errors import MissingDependency, OptionError
from sardonyx.native.carve import plan
from sardonyx.native.compiling import Generated, compile, convert_graph, generate
from sardonyx.native.model import FolderError, NativeModel, load
from sardonyx.native.report import NativeReport
from sardonyx.native.select import scope
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

    With `native="auto"` only large groups are, and what cannot be built is left as it is.
    """
    automatic = options.native == "auto"
    try:
        compiler.find()
        found = plan(model, least=_LEAST if automatic else 0)
        if not found.parts:
            return None
        library = compiler.built(found.source, options)
    except (MissingDependency, compiler.CompilerError) as error:
        if not automatic:
            raise
        _warn_once(str(error))
        return None
    log.info("%d native kernels", len(found.parts))
    found.splice()
    return library


_warned: set[str] = set()


def _warn_once(why: str) -> None:
    if why not in _warned:
        _warned.add(why)
        log.warning("no native kernels: %s", why)
