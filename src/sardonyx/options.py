"""Every option, once: its default, environment variable, meaning, and whether it changes the compiled artifact."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
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
Precision: TypeAlias = Literal["float32", "bf16", "int8", "int4", "auto"]
Metric: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], float]
Intercept: TypeAlias = bool | Callable[[Any], object]
BoolOrAuto: TypeAlias = bool | Literal["auto"]
Provider: TypeAlias = str | tuple[str, Mapping[str, Any]]

_ENV_PREFIX = "SARDONYX_"
NUMBER = "{number}"
"""Placeholder for the file's number in a `dump` path."""


def _option(
    default: Any,
    doc: str,
    *,
    artifact: bool = False,
    of_precision: bool = False,
    legacy: Mapping[str, Callable[[str], Any]] | None = None,
) -> Any:
    """Declare an option; `legacy` maps environment variables of other programs to parsers of their values.

    One that is `of_precision` is an error without a precision below float32.
    """
    metadata = {"doc": doc, "artifact": artifact, "of_precision": of_precision, "legacy": legacy or {}}
    return field(default=default, metadata=metadata)


def _parse_bool(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError("use 1 or 0")
    return _BOOLEANS[text.lower()]


def parse_value(text: str) -> Any:
    """Parse the value of an option on a command line: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _parse_json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("use a JSON object")
    return value


_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Options:
    """All options. A dict with the same keys is accepted wherever an `Options` is.

    >>> Options.of({"fallback": "error"}).fallback
    'error'
    >>> Options.of({"falback": "error"})
    Traceback (most recent call last):
    sardonyx.errors.OptionError: unknown option 'falback'
      next: did you mean 'fallback'?
    """

    engine: str = _option("onnxruntime", "name of the engine that runs the model", artifact=True)
    engine_options: Mapping[str, Any] | None = _option(
        None, "a dict of engine-specific settings, see docs/engines.md; in the environment as JSON", artifact=True
    )
    compile_options: str = _option(
        "", "flags for an engine's compiler, as on a command line: '-O3 --mcpu=native'", artifact=True
    )
    compiler_path: str | None = _option(
        None, "the onnx-mlir binary; by default the one on PATH", artifact=True, legacy={"ONNX_MLIR_PATH": str}
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
        "folder for numbered .onnx files, each with its FX graph as text; or their path, with '{number}' in it",
        legacy={"ONNXRT_DUMP_PATH": lambda prefix: prefix + NUMBER},
    )
    report: str | None = _option(
        None, "HTML file that reports what was compiled: graphs, rules, times, errors; needs the extra 'report'"
    )
    repro: str | None = _option(None, "folder for programs that reproduce failures; the error names the one it wrote")
    verify: bool = _option(False, "compare each graph's first call with PyTorch")
    intercept: Intercept = _option(
        False, "print the arguments of each call; or a function that receives the call instead"
    )
    transforms: Sequence[Callable[[Any], Any]] = _option(
        (), "functions applied to the onnx.ModelProto before the session; each edits in place or returns a model"
    )
    translations: Mapping[Any, Callable[..., Any]] | None = _option(
        None,
        "functions by operator (torch.ops.mylib.op, or 'mylib::op') that override the built-in translations",
    )
    translator: Translator = _option(
        "sardonyx",
        "which translation is tried first: 'sardonyx', or 'torchlib' to check whether ours is at fault",
        artifact=True,
        legacy={"ONNXRT_CHANGE_REWRITER": lambda text: "sardonyx" if _parse_bool(text) else "torchlib"},
    )
    optimize: str | bool | Sequence[str] = _option(
        "default", "rewrite rules: 'default', 'none', 'default-Name', 'none+Name', or a list of names", artifact=True
    )
    native: BoolOrAuto = _option(
        "auto",
        "compile groups of operators to native kernels: True, False, or 'auto' in training, and in inference on CUDA",
        artifact=True,
    )
    cuda_graphs: BoolOrAuto = _option(
        "auto",
        "record CUDA graphs of shapes that repeat: True, False, or 'auto' for inference only",
        artifact=True,
    )
    precision: Precision = _option(
        "float32",
        "of linear layers of a float32 model, in inference on the CPU: 'float32', 'bf16', 'int8', 'int4', or 'auto' "
        "for the fastest of each; layers stay in a higher precision as far as `max_drop` asks, see docs/precision.md",
        artifact=True,
    )
    max_drop: float = _option(
        0.01,
        "how far results in lower precision may be from those in float32: their relative error",
        artifact=True,
        of_precision=True,
    )
    int4_block: int = _option(
        64,
        "weights of a column that share a scale in int4: 32, 64 or 128; fewer are more exact and larger",
        artifact=True,
        of_precision=True,
    )
    metric: Metric | None = _option(
        None,
        "a function of results and those in float32 that returns the drop, instead of the relative error",
        of_precision=True,
    )
    freeze: bool = _option(
        True, "make weights constants of the session for inference; an edited weight is detected", artifact=True
    )
    preallocate_outputs: bool | None = _option(
        None, "let torch allocate the outputs; by default only on an accelerator"
    )
    cache_size: int = _option(3, "sessions cached per compiled graph; the least recently used is evicted first")
    cache_dir: str | None = _option(
        None, "folder of the disk cache; by default in the user's cache folder; '' disables it"
    )
    cache_bytes: int = _option(
        8 * 2**30, "size limit of the disk cache; the least recently used entries are evicted first"
    )
    opset: int | None = _option(None, "ONNX opset; by default the newest that the engine runs well", artifact=True)

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            _check_type(option, getattr(self, option.name))
        for name in ("dump", "report", "repro", "cache_dir", "compiler_path"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        _check_flags(self.compile_options)
        if self.cache_size < 1:
            raise OptionError(f"cache_size is {self.cache_size!r}", hint="use an integer of at least 1")
        if self.cache_bytes < 0:
            raise OptionError(f"cache_bytes is {self.cache_bytes!r}", hint="use a number of bytes")
        if not 0 <= self.max_drop < math.inf:
            raise OptionError(f"max_drop is {self.max_drop!r}", hint="use a share, as 0.01 for one percent")
        if self.int4_block not in (32, 64, 128):
            raise OptionError(f"int4_block is {self.int4_block!r}", hint="use 32, 64 or 128")
        for name, default in _defaults_of_precision(type(self)).items():
            value = getattr(self, name)
            if value is not default and (default is None or value != default):
                self.require_precision(name)
        if self.precision != "float32" and not self.freeze:
            raise OptionError(
                f"precision={self.precision!r} and freeze=False",
                hint="leave out freeze=False: weights must be constants",
            )
        if self.translations is not None:
            object.__setattr__(self, "translations", _qualify_names(self.translations))
        for name, validate in _VALIDATORS.items():
            validate(getattr(self, name))
        if self.opset is not None and self.opset < opsets.OLDEST:
            raise OptionError(
                f"opset is {self.opset!r}", hint=f"use an integer from {opsets.OLDEST} on, or leave it out"
            )

    @classmethod
    def of(cls, given: Options | Mapping[str, Any] | None = None, **more: Any) -> Options:
        """Return options from an object or a mapping; for others, `defaults` and environment variables apply.

        In float32, only what is given here is an error without a precision.
        """
        if given is not None and not isinstance(given, (Options, Mapping)):
            raise OptionError(f"options are {given!r}", hint="use a dict, or a sardonyx.Options")
        unnamed = [key for key in given if not isinstance(key, str)] if isinstance(given, Mapping) else []
        if unnamed:
            raise OptionError(f"an option is named {unnamed[0]!r}", hint="names of options are text")
        explicit = _check_names(cls, more if isinstance(given, Options) else {**(given or {}), **more})
        before = vars(given) if isinstance(given, Options) else {**_from_environment(cls), **_defaults.get()}
        if {"precision": "float32", **before, **explicit}["precision"] == "float32":
            before = {**before, **_defaults_of_precision(cls)}
        return cls(**{**before, **explicit})

    def require_precision(self, name: str) -> None:
        """Raise if something is given that only means something in a precision below float32."""
        if self.precision == "float32":
            raise OptionError(
                f"{name}= without a precision", hint="use it with precision='auto', 'bf16', 'int8' or 'int4'"
            )

    @classmethod
    def describe(cls) -> str:
        """Return a Markdown table of every option."""
        rows = [
            f"| `{f.name}` | `{f.default!r}` | {variables} | {f.metadata['doc']} |"
            for f in dataclasses.fields(cls)
            for variables in [", ".join(f"`{name}`" for name in _environment_variables(f))]
        ]
        return "\n".join(["| option | default | environment | meaning |", "|---|---|---|---|", *rows])

    def artifact_key(self) -> tuple[str, ...]:
        """Return the options that change a compiled artifact, as part of its cache key."""
        return tuple(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.metadata["artifact"])


def _defaults_of_precision(cls: type[Options]) -> dict[str, Any]:
    """Return the defaults of the options that only mean something in a precision below float32."""
    return {f.name: f.default for f in dataclasses.fields(cls) if f.metadata["of_precision"]}


_defaults: ContextVar[Mapping[str, Any]] = ContextVar("sardonyx_defaults", default={})  # noqa: B039  # never edited


@contextmanager
def defaults(**values: Any) -> Iterator[None]:
    """While active, these values are the defaults of options; they take precedence over environment variables.

    >>> with defaults(cache_size=5):
    ...     Options.of().cache_size, Options.of({"cache_size": 2}).cache_size
    (5, 2)
    """
    token = _defaults.set({**_defaults.get(), **_check_names(Options, values)})
    try:
        yield
    finally:
        _defaults.reset(token)


def _check_type(option: dataclasses.Field[Any], value: object) -> None:
    accepts, hint = _TYPES[str(option.type)]
    if not accepts(value):
        hint = "use a name; sardonyx.engines() lists them" if option.name == "engine" else hint
        raise OptionError(f"{option.name} is {value!r}", hint=hint)


def check_providers(name: str, value: Any) -> Sequence[Provider] | None:
    """Return the list of providers of another program's option; raise if it is not one."""
    accepts, hint = _TYPES["Sequence[Provider] | None"]
    if not accepts(value):
        raise OptionError(f"{name} is {value!r}", hint=hint)
    providers: Sequence[Provider] | None = value
    return providers


def _qualify_names(translations: Mapping[Any, Any]) -> Mapping[str, Callable[..., Any]]:
    """Return translations by the qualified names of their operators."""
    by_name = {}
    for target, function in translations.items():
        overload: Any = getattr(target, "default", target)
        name = target if isinstance(target, str) else str(overload.name()) if hasattr(overload, "name") else ""
        if "::" not in name or not callable(function):
            raise OptionError(
                f"translations has {target!r}: {function!r}",
                hint='use torch.ops.mylib.op or "mylib::op", and a function',
            )
        by_name[name] = function
    return by_name


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_provider(value: object) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], Mapping)


def _are_strings(value: object) -> bool:
    return _is_sequence(value) and all(isinstance(x, str) for x in value)


def _is_one_of(*words: str) -> Callable[[object], bool]:
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
        lambda value: isinstance(value, (str, bool)) or _are_strings(value),
        "use 'default', 'none', 'default-Name', 'none+Name', or a list of names of rules",
    ),
    "Fallback": (_is_one_of(*get_args(Fallback)), _choices(get_args(Fallback))),
    "Translator": (_is_one_of(*get_args(Translator)), _choices(get_args(Translator))),
    "Precision": (_is_one_of(*get_args(Precision)), _choices(get_args(Precision))),
    "Metric | None": (_or_none(callable), "use a function of two lists of tensors that returns a number"),
    "float": (lambda value: _is_integer(value) or isinstance(value, float), "use a number"),
    "BoolOrAuto": (
        lambda value: isinstance(value, bool) or _is_one_of("auto")(value),
        _choices((True, False, "auto")),
    ),
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
"""For each declared type of an option: a check of a value, and the hint if it fails."""


_VALIDATORS: dict[str, Callable[[Any], None]] = {}


def validates(option: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a validator for an option, such as one whose values are names that another module knows."""

    def register(validate: Callable[[Any], None]) -> Callable[[Any], None]:
        _VALIDATORS[option] = validate
        return validate

    return register


def _check_flags(text: str) -> None:
    try:
        shlex.split(text)
    except ValueError as error:
        raise OptionError(f"compile_options is {text!r}: {error}", hint="quote as in a shell") from error


def check_keywords(given: Mapping[str, Any], *functions: Callable[..., Any]) -> None:
    """Raise for a keyword that is no option but resembles a keyword of these functions.

    >>> def draw(*, width=1, **options):
    ...     check_keywords(options, draw)
    >>> draw(widht=2)
    Traceback (most recent call last):
    sardonyx.errors.OptionError: unknown option 'widht'
      next: did you mean 'width'?
    """
    names = [f.name for f in dataclasses.fields(Options)]
    own = [name for function in functions for name in _keywords_of(function)]
    for key in given:
        near = difflib.get_close_matches(key, [*own, *names], n=1)
        if near and near[0] in own and key not in (*own, *names):
            raise OptionError(f"unknown option {key!r}", hint=f"did you mean {near[0]!r}?")


def _keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the optional arguments of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is not inspect.Parameter.empty]


def _check_names(cls: type[Options], values: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in names:
            raise OptionError(f"unknown option {key!r}", hint=_suggest(key, names))
    return dict(values)


def _suggest(key: str, names: Sequence[str]) -> str:
    """Return a hint for an unknown option: a similar name, or the replacement of another program's option."""
    if key in _FOREIGN_NAMES:
        return _FOREIGN_NAMES[key]
    for known, cutoff in ((names, 0.75), (list(_FOREIGN_NAMES), 0.75), (names, 0.5)):
        near = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
        if near:
            return " ".join(filter(None, (f"did you mean {near[0]!r}?", _FOREIGN_NAMES.get(near[0]))))
    return "known options: " + ", ".join(names)


_IN_TORCH_COMPILE = "it is an argument of torch.compile, not an option: torch.compile(model, {}=...)"
_FOREIGN_NAMES = {
    "dynamic": _IN_TORCH_COMPILE.format("dynamic"),
    "fullgraph": _IN_TORCH_COMPILE.format("fullgraph"),
    "mode": _IN_TORCH_COMPILE.format("mode"),
    "backend": 'use torch.compile(model, backend="sardonyx"), and "engine" for what runs the model',
    "calibration": "it is an argument of sardonyx.export and optimize: sessions choose a precision by their first call",
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
"""Hints for options of other programs and for arguments of other functions."""


def _environment_variables(option: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the environment variables that set an option; none if its value cannot be written as text."""
    if str(option.type) not in _PARSERS:
        return ()
    return (_ENV_PREFIX + option.name.upper(), *option.metadata["legacy"])


_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": int,
    "bool": _parse_bool,
    "bool | None": _parse_bool,
    "str": str,
    "str | bool | Sequence[str]": lambda text: _BOOLEANS.get(text.lower(), text),
    "str | None": str,
    "Fallback": str,
    "Translator": str,
    "Intercept": _parse_bool,
    "BoolOrAuto": lambda text: _BOOLEANS.get(text.lower(), text),
    "Mapping[str, Any] | None": _parse_json_object,
    "Sequence[Provider] | None": lambda text: tuple(part.strip() for part in text.split(",")),
}


def _from_environment(cls: type[Options]) -> dict[str, Any]:
    values = {}
    for option in dataclasses.fields(cls):
        name = next((name for name in _environment_variables(option) if os.environ.get(name)), None)
        if name is None:
            continue
        text = os.environ[name]
        try:
            values[option.name] = option.metadata["legacy"].get(name, _PARSERS[str(option.type)])(text)
        except ValueError as error:
            raise OptionError(f"{name} is {text!r}, which is not a value of {option.name!r}: {error}") from error
    return values
