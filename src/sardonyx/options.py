"""Every option, once: its default, environment variable, meaning, and whether it changes the compiled artifact."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeGuard, get_args

from sardonyx import opsets
from sardonyx.errors import OptionError

Fallback: TypeAlias = Literal["warn", "error", "quiet"]
Translator: TypeAlias = Literal["sardonyx", "torchlib"]
Intercept: TypeAlias = bool | Callable[[Any], object]
Native: TypeAlias = bool | Literal["auto"]
Provider: TypeAlias = str | tuple[str, Mapping[str, Any]]

_ENV_PREFIX = "SARDONYX_"
NUMBER = "{number}"
"""Stands for the number of a file in a `dump` that is more than a folder."""


def _option(
    default: Any, doc: str, *, artifact: bool = False, old: Mapping[str, Callable[[str], Any]] | None = None
) -> Any:
    """An option; `old` are environment variables of other programs, each with what its text means here."""
    return field(default=default, metadata={"doc": doc, "artifact": artifact, "old": old or {}})


def _yes_or_no(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError("use 1 or 0")
    return _WORDS[text.lower()]


def value_of_text(text: str) -> Any:
    """A value of an option as it is written on a command line: JSON, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("use a JSON object")
    return found


_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Options:
    """The options. A dict with the same keys is accepted wherever an `Options` is.

    >>> Options.of({"fallback": "error"}).fallback
    'error'
    >>> Options.of({"falback": "error"})
    Traceback (most recent call last):
    sardonyx.errors.OptionError: unknown option 'falback'
      next: did you mean 'fallback'?
    """

    engine: str = _option("onnxruntime", "name of the engine that runs the model", artifact=True)
    engine_options: Mapping[str, Any] | None = _option(
        None, "dict of engine-specific settings, see docs/engines.md; JSON in the environment", artifact=True
    )
    compile_options: str = _option(
        "", "flags for an engine's compiler, as on a command line: '-O3 --mcpu=native'", artifact=True
    )
    compiler_path: str | None = _option(
        None, "the onnx-mlir binary; by default the one on PATH", artifact=True, old={"ONNX_MLIR_PATH": str}
    )
    compiler_image: str | None = _option(
        None, "container image with onnx-mlir, run by podman or docker; used instead of a binary", artifact=True
    )
    providers: Sequence[Provider] | None = _option(
        None, "ONNX Runtime execution providers; by default chosen from the tensors' device", artifact=True
    )
    session_options: Any = _option(
        None,
        "dict of onnxruntime.SessionOptions attributes (and 'config' entries), or such an object",
        artifact=True,
    )
    fallback: Fallback = _option("warn", "what happens to an operator ONNX cannot express: 'warn', 'error' or 'quiet'")
    dump: str | None = _option(
        None,
        "folder for numbered .onnx files and their FX graphs; or the path of these files, with '{number}' in it",
        old={"ONNXRT_DUMP_PATH": lambda prefix: prefix + NUMBER},
    )
    report: str | None = _option(
        None, "HTML file about everything that is compiled: graphs, rules, times, errors; needs the extra 'report'"
    )
    repro: str | None = _option(
        None, "folder for programs that reproduce failures, each in a subfolder that the error names"
    )
    verify: bool = _option(False, "compare each graph's first call with PyTorch")
    intercept: Intercept = _option(
        False, "print the arguments of each call, then run it; or a function to call with them instead"
    )
    transforms: Sequence[Callable[[Any], Any]] = _option(
        (), "callables applied to the onnx.ModelProto before the session; each edits in place or returns a model"
    )
    translations: Mapping[Any, Callable[..., Any]] | None = _option(
        None,
        "functions by operator (torch.ops.mylib.op, or 'mylib::op') that replace the table's translations",
    )
    translator: Translator = _option(
        "sardonyx",
        "whose translations come first: 'sardonyx', or 'torchlib' to find out whether ours is wrong",
        artifact=True,
        old={"ONNXRT_CHANGE_REWRITER": lambda text: "sardonyx" if _yes_or_no(text) else "torchlib"},
    )
    optimize: str | bool | Sequence[str] = _option(
        "default", "rewrite rules: 'default', 'none', 'default-Name', 'none+Name', or a list of names", artifact=True
    )
    native: Native = _option(
        "auto",
        "compile groups of operators to native kernels: True, False, or 'auto' for large ones in training",
        artifact=True,
    )
    freeze: bool = _option(
        True, "make weights constants of the session for inference; an edited weight is detected", artifact=True
    )
    preallocate_outputs: bool | None = _option(
        None, "let torch allocate the outputs; by default only on an accelerator"
    )
    cache_size: int = _option(3, "size of the LRU cache of sessions of each compiled graph")
    cache_dir: str | None = _option(
        None, "folder of the disk cache; by default in the user's cache folder; '' disables the cache"
    )
    cache_bytes: int = _option(8 * 2**30, "size limit of the disk cache; the least recently used entries are dropped")
    opset: int | None = _option(None, "ONNX opset; by default the newest the engine runs well", artifact=True)

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            _check_type(option, getattr(self, option.name))
        for name in ("dump", "report", "repro", "cache_dir", "compiler_path"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        _check_flags(self.compile_options)
        for name, validate in _VALIDATORS.items():
            validate(getattr(self, name))
        if self.cache_size < 1:
            raise OptionError(f"cache_size is {self.cache_size!r}", hint="use an integer of at least 1")
        if self.cache_bytes < 0:
            raise OptionError(f"cache_bytes is {self.cache_bytes!r}", hint="use a number of bytes")
        if self.translations is not None:
            object.__setattr__(self, "translations", _by_name(self.translations))
        if self.opset is not None and self.opset < opsets.OLDEST:
            raise OptionError(
                f"opset is {self.opset!r}", hint=f"use an integer from {opsets.OLDEST} on, or leave it out"
            )

    @classmethod
    def of(cls, given: Options | Mapping[str, Any] | None = None, **more: Any) -> Options:
        """Options from an object or a mapping, completed by environment variables and `defaults`."""
        if given is not None and not isinstance(given, (Options, Mapping)):
            raise OptionError(f"options are {given!r}", hint="use a dict, or a sardonyx.Options")
        unnamed = [key for key in given if not isinstance(key, str)] if isinstance(given, Mapping) else []
        if unnamed:
            raise OptionError(f"an option is named {unnamed[0]!r}", hint="names of options are text")
        if isinstance(given, Options):
            return dataclasses.replace(given, **_known(cls, more))
        return cls(**{**_from_environment(cls), **_defaults.get(), **_known(cls, {**(given or {}), **more})})

    @classmethod
    def describe(cls) -> str:
        """A table of every option, for the documentation and the command line."""
        rows = [
            f"| `{f.name}` | `{f.default!r}` | {', '.join(f'`{v}`' for v in _variables(f))} | {f.metadata['doc']} |"
            for f in dataclasses.fields(cls)
        ]
        return "\n".join(["| option | default | environment | meaning |", "|---|---|---|---|", *rows])

    def artifact_key(self) -> tuple[str, ...]:
        """The options that are part of the key of a compiled artifact."""
        return tuple(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.metadata["artifact"])


_defaults: ContextVar[Mapping[str, Any]] = ContextVar("sardonyx_defaults", default={})  # noqa: B039  # never edited


@contextmanager
def defaults(**given: Any) -> Iterator[None]:
    """While active, these options count where a mapping does not give them, before environment variables.

    >>> with defaults(cache_size=5):
    ...     Options.of().cache_size, Options.of({"cache_size": 2}).cache_size
    (5, 2)
    """
    token = _defaults.set({**_defaults.get(), **_known(Options, given)})
    try:
        yield
    finally:
        _defaults.reset(token)


def _check_type(option: dataclasses.Field[Any], value: object) -> None:
    accepts, hint = _TYPES[str(option.type)]
    if not accepts(value):
        hint = "use a name; sardonyx.engines() lists them" if option.name == "engine" else hint
        raise OptionError(f"{option.name} is {value!r}", hint=hint)


def _by_name(translations: Mapping[Any, Any]) -> Mapping[str, Callable[..., Any]]:
    """Translations by the qualified names of operators."""
    found = {}
    for target, function in translations.items():
        overload: Any = getattr(target, "default", target)
        name = target if isinstance(target, str) else str(overload.name()) if hasattr(overload, "name") else ""
        if "::" not in name or not callable(function):
            raise OptionError(
                f"translations has {target!r}: {function!r}",
                hint='use torch.ops.mylib.op or "mylib::op", and a function',
            )
        found[name] = function
    return found


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_provider(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping)


def _are_names(value: object) -> bool:
    return _is_sequence(value) and all(isinstance(x, str) for x in value)


def _is_of(*words: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and value in words


def _or_none(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or accepts(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _choices(words: Sequence[object]) -> str:
    return "use one of " + ", ".join(map(repr, words))


_TYPES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "int": (_is_integer, "use an integer"),
    "int | None": (_or_none(_is_integer), "use an integer, or leave it out"),
    "bool": (_is_bool, "use True or False"),
    "bool | None": (_or_none(_is_bool), "use True, False or None"),
    "str": (_is_text, "use text"),
    "str | None": (lambda value: value is None or isinstance(value, (str, os.PathLike)), "use text"),
    "str | bool | Sequence[str]": (
        lambda value: isinstance(value, (str, bool)) or _are_names(value),
        "use 'default', 'none', 'default-Name', 'none+Name', or a list of names of rules",
    ),
    "Fallback": (_is_of(*get_args(Fallback)), _choices(get_args(Fallback))),
    "Translator": (_is_of(*get_args(Translator)), _choices(get_args(Translator))),
    "Native": (lambda value: isinstance(value, bool) or _is_of("auto")(value), _choices((True, False, "auto"))),
    "Intercept": (
        lambda value: isinstance(value, bool) or callable(value),
        "use True, or a function that takes the call",
    ),
    "Sequence[Callable[[Any], Any]]": (
        lambda value: _is_sequence(value) and all(map(callable, value)),
        "use a list of functions, also for a single one",
    ),
    "Sequence[Provider] | None": (
        _or_none(lambda value: _is_sequence(value) and all(map(_is_provider, value))),
        "use a list of names or (name, settings), also for a single one",
    ),
    "Mapping[str, Any] | None": (
        _or_none(lambda value: isinstance(value, Mapping) and all(map(_is_text, value))),
        "use a dict with text as its keys",
    ),
    "Mapping[Any, Callable[..., Any]] | None": (
        _or_none(lambda value: isinstance(value, Mapping)),
        "use a dict: {torch.ops.mylib.op: function}",
    ),
    "Any": (
        lambda value: not isinstance(value, (str, bytes, bool, int, float, list, tuple)),
        "use a dict, or an onnxruntime.SessionOptions",
    ),
}
"""For each type that an option is declared with, what is one, and what to use instead."""


_VALIDATORS: dict[str, Callable[[Any], None]] = {}


def validates(option: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Let a function check the values of an option, as of one whose values are names that another module knows."""

    def register(validate: Callable[[Any], None]) -> Callable[[Any], None]:
        _VALIDATORS[option] = validate
        return validate

    return register


def _check_flags(text: str) -> None:
    try:
        shlex.split(text)
    except ValueError as error:
        raise OptionError(f"compile_options is {text!r}: {error}", hint="quote as in a shell") from error


def _known(cls: type[Options], given: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    for key in given:
        if key not in names:
            raise OptionError(f"unknown option {key!r}", hint=_suggestion(key, names))
    return dict(given)


def _suggestion(key: str, names: Sequence[str]) -> str:
    """What may be meant by the name of no option: one of ours, or one of another program's."""
    if key in _ELSEWHERE:
        return _ELSEWHERE[key]
    for known, cutoff in ((names, 0.75), (list(_ELSEWHERE), 0.75), (names, 0.5)):
        near = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
        if near:
            return " ".join(filter(None, (f"did you mean {near[0]!r}?", _ELSEWHERE.get(near[0]))))
    return "known options: " + ", ".join(names)


_IN_TORCH_COMPILE = "it is an argument of torch.compile, and no option: torch.compile(model, {}=...)"
_ELSEWHERE = {
    "dynamic": _IN_TORCH_COMPILE.format("dynamic"),
    "fullgraph": _IN_TORCH_COMPILE.format("fullgraph"),
    "mode": _IN_TORCH_COMPILE.format("mode"),
    "backend": 'use torch.compile(model, backend="sardonyx"), and "engine" for what runs the model',
    "dispatcher": "use 'translations': functions by operator",
    "custom_translation_table": "use 'translations': functions by operator",
    "onnx_registry": "use 'translations' for operators of your own, and 'opset'",
    "dynamic_shapes": "use torch.compile(dynamic=True), or sardonyx.export(dynamic_shapes=...)",
    "export_options": "use 'opset', 'translations', and torch.compile(dynamic=True)",
    "use_aot_autograd": "leave it out: graphs always come from AOTAutograd",
    "preferred_execution_providers": "use 'providers'",
    "default_execution_providers": "use 'providers'",
    "infer_execution_providers": "leave it out: the provider follows the tensors' device unless 'providers' names one",
    "execution_providers": "use 'providers'",
    "ort_session_options": "use 'session_options'",
    "preallocate_output": "use 'preallocate_outputs'",
    "pre_ort_model_transforms": "use 'transforms'",
    "target_opset": "use 'opset'",
    "opset_version": "use 'opset'",
    "enable_pattern": "use 'optimize': 'none+Name'",
    "disable_pattern": "use 'optimize': 'default-Name'",
    "patterns": "use 'optimize'",
    "rewrite": "use 'optimize': 'none' or 'default'",
    "ort_optimization_level": "use 'session_options': {'graph_optimization_level': ...}",
    "dump_prefix": "use 'dump', a folder, or a path with '{number}' in it",
    "verbose": "set TORCH_LOGS=sardonyx in the environment",
    "compiler_image_name": "use 'compiler_image'",
    "compile_args": "use 'compile_options'",
    "container_engine": "use 'engine_options': {'container': ...}",
    "session_cache_limit": "use 'cache_size'",
}
"""Names of options in other programs and of arguments elsewhere, each with what to use here."""


def _variables(option: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The environment variables that set an option; none where text cannot say its value."""
    if str(option.type) not in _PARSERS:
        return ()
    return (_ENV_PREFIX + option.name.upper(), *option.metadata["old"])


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "bool": _yes_or_no,
    "bool | None": _yes_or_no,
    "str": str,
    "str | bool | Sequence[str]": lambda text: _WORDS.get(text.lower(), text),
    "str | None": str,
    "Fallback": str,
    "Translator": str,
    "Intercept": _yes_or_no,
    "Native": lambda text: _WORDS.get(text.lower(), text),
    "Mapping[str, Any] | None": _json,
    "Sequence[Provider] | None": lambda text: tuple(part.strip() for part in text.split(",")),
}


def _from_environment(cls: type[Options]) -> dict[str, Any]:
    found = {}
    for option in dataclasses.fields(cls):
        name = next((name for name in _variables(option) if os.environ.get(name)), None)
        if name is None:
            continue
        text = os.environ[name]
        try:
            found[option.name] = option.metadata["old"].get(name, _PARSERS[str(option.type)])(text)
        except ValueError as error:
            raise OptionError(f"{name} is {text!r}, which is no value of {option.name!r}: {error}") from error
    return found
