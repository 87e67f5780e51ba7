"""Which engines there are: ours, and those of other packages, by the entry points `sardonyx.engines`."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

import torch

from sardonyx import opsets
from sardonyx.engines.engine import Availability, Engine
from sardonyx.errors import EngineError, MissingDependency, OptionError
from sardonyx.options import Options

_OURS = {
    "onnxruntime": "sardonyx.engines.onnxruntime:OnnxRuntime",
    "reference": "sardonyx.engines.reference:Reference",
    "openvino": "sardonyx.engines.openvino:OpenVino",
    "iree": "sardonyx.engines.iree:Iree",
    "onnx-mlir": "sardonyx.engines.onnx_mlir:OnnxMlir",
    "auto": "sardonyx.engines.auto:Auto",
}


@cache
def _known() -> dict[str, str]:
    """Where each engine is, by name; another package may not take the name of ours."""
    return {**{entry.name: entry.value for entry in entry_points(group="sardonyx.engines")}, **_OURS}


_registered: dict[str, Engine] = {}


def register(engine: Engine) -> None:
    """Make an engine known in this process, as an entry point makes it known in every one."""
    if engine.name in _OURS:
        raise OptionError(f"{engine.name!r} is the name of an engine of sardonyx", hint="choose another one")
    _registered[engine.name] = engine


def find(name: str) -> Engine:
    """The engine of that name."""
    return _registered.get(name) or _loaded(name)


def opset_of_files(options: Options) -> int:
    """The opset of files for an engine, unless the options say which."""
    return options.opset or min(opsets.NEWEST, find(options.engine).opset(torch.device("cpu"), frozenset()))


def require(name: str) -> None:
    """An error where an engine is unknown, or not installed."""
    found = find(name).probe()
    if not found.installed:
        raise MissingDependency(
            f"the engine {name!r} cannot be used here: {found.reason}",
            hint="install that, or use an engine that sardonyx.engines(), or `sardonyx engines`, lists as installed",
        )


@cache
def _loaded(name: str) -> Engine:
    if name not in _known():
        near = difflib.get_close_matches(name, _names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "known engines: " + ", ".join(_names())
        raise OptionError(f"unknown engine {name!r}", hint=hint)
    module, _, attribute = _known()[name].partition(":")
    try:
        engine = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise EngineError(f"the engine {name!r} cannot be loaded from {_known()[name]!r}: {error}") from error
    if not isinstance(engine, Engine):
        raise EngineError(f"the engine {name!r} is a {type(engine).__name__}, no sardonyx.engines.Engine")
    return engine


def engines() -> list[Availability]:
    """Every known engine: installed or not, its version, and the reason.

    >>> [engine.name for engine in engines()][:2]
    ['onnxruntime', 'reference']
    """
    return [_probed(name) for name in _names()]


def _names() -> list[str]:
    """Ours first."""
    return list(dict.fromkeys([*_OURS, *_known(), *_registered]))


def _probed(name: str) -> Availability:
    try:
        return find(name).probe()
    except EngineError as error:
        return Availability(name, None, error.what)
