"""The registry of engines: ours, and those of other packages by the entry points `sardonyx.engines`."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

import onnx
import torch

from sardonyx import opsets
from sardonyx.engines.engine import Availability, Engine
from sardonyx.errors import EngineError, MissingDependency, OptionError
from sardonyx.options import Options, validates

_BUILTIN = {
    "onnxruntime": "sardonyx.engines.onnxruntime:OnnxRuntime",
    "reference": "sardonyx.engines.reference:Reference",
    "openvino": "sardonyx.engines.openvino:OpenVino",
    "iree": "sardonyx.engines.iree:Iree",
    "onnx-mlir": "sardonyx.engines.onnx_mlir:OnnxMlir",
    "auto": "sardonyx.engines.auto:Auto",
}


@cache
def _locations() -> dict[str, str]:
    """Map engine names to locations; other packages cannot override ours."""
    return {**{entry.name: entry.value for entry in entry_points(group="sardonyx.engines")}, **_BUILTIN}


_registered: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    """Register an engine in this process; an entry point registers it in every process."""
    if engine.name in _BUILTIN:
        raise OptionError(f"{engine.name!r} is the name of a built-in engine", hint="choose another one")
    _registered[engine.name] = engine


def find(name: str) -> Engine:
    """Return the engine of that name."""
    return _registered.get(name) or _load(name)


@validates("opset")
def _check_opset(opset: int | None) -> None:
    """Raise for an opset that onnx does not know."""
    newest = onnx.defs.onnx_opset_version()
    if opset is not None and opset > newest:
        raise OptionError(
            f"opset is {opset}, but this onnx supports at most {newest}",
            hint=f"use an integer from {opsets.OLDEST} to {newest}, or leave it out",
        )


def opset_of_files(options: Options) -> int:
    """Return the opset of files for an engine, unless the options set one."""
    return options.opset or min(opsets.NEWEST, find(options.engine).opset(torch.device("cpu"), frozenset()))


def require(name: str) -> None:
    """Raise if an engine is unknown or not installed."""
    availability = find(name).probe()
    if not availability.installed:
        raise MissingDependency(
            f"the engine {name!r} is not available: {availability.reason}",
            hint="install it, or use one that `sardonyx engines` or sardonyx.engines() lists as installed",
        )


@cache
def _load(name: str) -> Engine:
    if name not in _locations():
        near = difflib.get_close_matches(name, _names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known engines: " + ", ".join(_names())
        raise OptionError(f"unknown engine {name!r}", hint=hint)
    module, _, attribute = _locations()[name].partition(":")
    try:
        engine = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise EngineError(f"the engine {name!r} cannot be loaded from {_locations()[name]!r}: {error}") from error
    if not isinstance(engine, Engine):
        raise EngineError(f"the engine {name!r} is a {type(engine).__name__}, not a sardonyx.engines.Engine")
    return engine


def engines() -> list[Availability]:
    """List every known engine: its version if installed, or the reason why it is not.

    >>> [engine.name for engine in engines()][:2]
    ['onnxruntime', 'reference']
    """
    return [_probe(name) for name in _names()]


def _names() -> list[str]:
    """Return the names of engines, built-in ones first."""
    return list(dict.fromkeys([*_BUILTIN, *_locations(), *_registered]))


def _probe(name: str) -> Availability:
    try:
        return find(name).probe()
    except EngineError as error:
        return Availability(name, None, error.what)
