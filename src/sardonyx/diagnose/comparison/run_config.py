"""A way of running a model: torch, torch in double precision, or an engine with its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import OptionError
from sardonyx.options import Options, parse_value

RunConfigLike: TypeAlias = "str | Options | Mapping[str, Any] | RunConfig"
"""What `RunConfig.of` accepts: text, or the options to run with."""

LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "layout": "ORT_ENABLE_LAYOUT",
    "all": "ORT_ENABLE_ALL",
}
"""ONNX Runtime's graph optimization levels, by short name."""

_TORCH = {"torch": None, "torch:float64": torch.float64}
_FORMAT_HINT = "use 'torch', 'torch:float64', an engine's name, or 'onnxruntime:optimize=none,level=none,native=true'"
_GROUPS = {"config": "config", "session": "session_options", "engine": "engine_options"}


@dataclass(frozen=True)
class RunConfig:
    """How to run a model: what the arguments `way`, `ways` and `against` say.

    `torch` and `torch:float64` run the module. An engine's name runs the exported model in it. Options follow a
    colon: `optimize=none`, `native=true`, `level=basic` for ONNX Runtime's own optimizations, `config.NAME=…` for
    an entry of its session's configuration, `session.NAME=…` for an attribute of its session options, `engine.NAME=…`
    for an entry of `engine_options`.

    >>> config = RunConfig.of("onnxruntime:optimize=none,config.session.intra_op.allow_spinning=0")
    >>> config.options.optimize, config.options.session_options
    ('none', {'config': {'session.intra_op.allow_spinning': '0'}})
    """

    name: str
    options: Options | None = None
    """The engine's options; None for torch."""
    dtype: torch.dtype | None = None
    """The dtype that torch computes in; None for the model's own."""

    @classmethod
    def of(cls, value: RunConfigLike) -> RunConfig:
        """Return the configuration that a text or options describe."""
        if isinstance(value, RunConfig):
            return value
        if not isinstance(value, str):
            chosen = Options.of(value)
            return cls(chosen.engine, chosen)
        if value in _TORCH:
            return cls(value, None, _TORCH[value])
        engine, _, rest = value.partition(":")
        if engine == "torch":
            raise OptionError(f"{value!r} is not a way to run a model", hint=_FORMAT_HINT)
        return cls(value, _parse_options(engine, rest))

    @property
    def is_torch(self) -> bool:
        """Whether torch runs the model, not an engine."""
        return self.options is None

    def plain(self) -> RunConfig:
        """Return the same engine without rules, kernels, its own optimizations, or other options."""
        engine = (self.options or Options()).engine
        level = ",level=none" if find_engine(engine).takes_session_options else ""
        return RunConfig.of(f"{engine}:optimize=none{level}")

    def __str__(self) -> str:
        return self.name


PLAIN = "onnxruntime:optimize=none,level=none"
"""ONNX Runtime with the exported model, without optimizations."""


def _parse_options(engine: str, text: str) -> Options:
    chosen: dict[str, Any] = {"engine": engine, "native": False}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"{part!r} is not an option of the form NAME=VALUE", hint=_FORMAT_HINT)
        _set_option(chosen, key.strip(), value.strip())
    return Options.of(chosen)


def _set_option(chosen: dict[str, Any], key: str, value: str) -> None:
    group, dot, name = key.partition(".")
    if key == "level":
        chosen.setdefault("session_options", {})["graph_optimization_level"] = level(value)
    elif dot and group == "config":
        chosen.setdefault("session_options", {}).setdefault("config", {})[name] = value
    elif dot and group in _GROUPS:
        chosen.setdefault(_GROUPS[group], {})[name] = parse_value(value)
    else:
        chosen[key] = value if key in ("optimize", "compile_options", "translator") else parse_value(value)


def level(name: str) -> Any:
    """Return ONNX Runtime's constant for an optimization level."""
    from sardonyx.native.session import onnxruntime

    if name not in LEVELS:
        raise OptionError(f"there is no level {name!r}", hint="use one of " + ", ".join(LEVELS))
    return getattr(onnxruntime().GraphOptimizationLevel, LEVELS[name])
