"""The model that a command line names: an ONNX file, an exported program, or a factory in Python."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import logging
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from sardonyx import dtypes
from sardonyx.cli import _feeds, _pt2
from sardonyx.cli._feeds import Array
from sardonyx.cli._messages import stdout_to_stderr
from sardonyx.doors.export import export
from sardonyx.doors.optimize import optimize
from sardonyx.doors.program import Program, map_external_weights
from sardonyx.errors import MissingDependency, OptionError, SardonyxError
from sardonyx.model_files import find_fault, load_model
from sardonyx.options import Options
from sardonyx.precision.plan import FLOAT32

if TYPE_CHECKING:
    from sardonyx.diagnose.comparison.subject import CallArguments

log = logging.getLogger(__name__)

SourceKind: TypeAlias = Literal["module", "pt2", "onnx"]

_FORMS = "use model.onnx, a .pt2 file of torch.export.save, or package.module:factory, or path/file.py:factory"
_RETURN = "let it return (module, args) or (module, args, kwargs)"
_SEED = 0
_RANDOM_CALIBRATION = "the precision is chosen by random inputs, for which a bound says little: give some with %s FILE"
MODEL_KEY = "sardonyx.model"
"""Key of the model in the context of a command."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The options --inputs, --size and --seed of a command."""

    file: Path | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Values of named sizes."""
    seed: int = 0
    """Seed of random inputs."""

    def __bool__(self) -> bool:
        return self.file is not None or bool(self.sizes)


class Source(ABC):
    """A model given on the command line: a factory of modules, a file of torch.export, or an ONNX file."""

    kind: SourceKind

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    @abstractmethod
    def name(self) -> str:
        """Return a short name, for files and reports."""

    @abstractmethod
    def module(self) -> Any:
        """Return the module or function; raise for an ONNX file."""

    @abstractmethod
    def example(self) -> CallArguments | None:
        """Return example arguments of the module, if it has any."""

    def require_example(self) -> CallArguments:
        """Return example arguments of the module; raise if it has none."""
        call = self.example()
        if call is None:
            raise SardonyxError(f"{self.text} returns a module without example arguments", hint=_RETURN)
        return call

    @abstractmethod
    def model(self, options: Options, **export_options: Any) -> ir.Model:
        """Return the ONNX model, exported if necessary; weights are not copied."""

    @abstractmethod
    def program(self, options: Options, **export_options: Any) -> Program:
        """Return the model after rewrite rules, as `sardonyx.export` or `sardonyx.optimize` does."""

    @abstractmethod
    def calibration(self, files: Sequence[Path], options: Options) -> Sequence[Any]:
        """Return the calls by which a lower precision is chosen, from files of inputs; none if it is float32."""

    @abstractmethod
    def call(self, feeds: Mapping[str, Array]) -> CallArguments:
        """Return the module's arguments for these inputs of the ONNX model."""

    def feeds(self, inputs: Inputs, model: ir.Model) -> dict[str, Array]:
        """Return inputs of the ONNX model by name: from a file, else the example arguments, else random ones."""
        if inputs.file is not None and inputs.sizes:
            raise OptionError(f"{inputs.file} already determines the sizes", hint="leave out --size, or --inputs")
        if inputs.file is not None:
            return _feeds.read_inputs(inputs.file, model)
        example = None if inputs.sizes else self._example_feeds(model)
        return example or _feeds.random_inputs(model, inputs.sizes, inputs.seed)

    def lowered(self, inputs: Inputs, options: Options) -> tuple[ir.Model, Options]:
        """Return the model after rewrite rules, without native kernels, and the options left for `as_file`.

        The precision of a module is lowered here, where its layers are seen best, and that of a file by its inputs.
        """
        if self.kind == "onnx" or options.precision == FLOAT32:
            return self.program(Options.of(options, native=False, precision=FLOAT32)).model, options
        calibration = self.calibration([] if inputs.file is None else [inputs.file], options)
        program = self.program(Options.of(options, native=False), calibration=calibration)
        return program.model, Options.of(options, precision=FLOAT32)

    def as_file(
        self, model: ir.Model, inputs: Inputs, options: Options, **overrides: Any
    ) -> tuple[Program, dict[str, torch.Tensor]]:
        """Return a program of the ONNX model, which takes its inputs, not the module's arguments; and these inputs."""
        feeds = self.feeds(inputs, model)
        calibration = [] if options.precision == FLOAT32 else [tensors(feeds)]
        if calibration and self.kind == "onnx" and inputs.file is None:
            log.warning(_RANDOM_CALIBRATION, "--inputs")
        program = optimize(model, calibration=calibration, **option_keywords(options, **overrides))
        return program, {name: tensor(feeds[name]) for name in program.inputs}

    def _example_feeds(self, model: ir.Model) -> dict[str, Array] | None:
        """Return the example arguments as inputs of the ONNX model, if there are any."""
        return None

    def fault(self) -> str | None:
        """Return why the model is invalid, if that can be found out without running it."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"


class OnnxFile(Source):
    """An ONNX file."""

    kind = "onnx"

    @property
    def name(self) -> str:
        """Return the file's name without its suffix."""
        return Path(self.text).stem

    def module(self) -> Any:
        """Not available for an ONNX file."""
        raise SardonyxError(
            f"{self.text} is an ONNX file, but this command needs a torch module",
            hint="use package.module:factory, or a .pt2 file of torch.export.save",
        )

    def example(self) -> CallArguments | None:
        """Not available for an ONNX file."""
        return None

    def model(self, options: Options, **export_options: Any) -> ir.Model:
        """Return the model; external weights stay on disk."""
        if export_options:
            raise OptionError(f"{self.text} is already exported, so {', '.join(export_options)} cannot be set")
        return self._loaded

    def program(self, options: Options, *, calibration: Sequence[Any] = (), **export_options: Any) -> Program:
        """Return the model after rewrite rules."""
        return optimize(self.model(options, **export_options), calibration=calibration, **option_keywords(options))

    def calibration(self, files: Sequence[Path], options: Options) -> Sequence[Any]:
        """Return the inputs in these files by name; without any, random ones."""
        _check_calibration(files, options)
        if options.precision == FLOAT32:
            return []
        if not files:
            log.warning(_RANDOM_CALIBRATION, "--calibration")
            return [tensors(_feeds.random_inputs(self._loaded, {}, _SEED))]
        return [tensors(_feeds.read_inputs(path, self._loaded)) for path in files]

    def call(self, feeds: Mapping[str, Array]) -> CallArguments:
        """Return the inputs in order, for the program."""
        return tuple(tensor(feeds[str(value.name)]) for value in _feeds.inputs_of(self._loaded)), {}

    def fault(self) -> str | None:
        """Return why ONNX's checker rejects the file."""
        return find_fault(self.text)

    @cached_property
    def _loaded(self) -> ir.Model:
        return load_model(self.text)


class _TorchSource(Source):
    """A torch module; the last exported program is cached."""

    _program: Program | None = None

    @abstractmethod
    def _dynamic(self) -> dict[str, Any]:
        """Return the default dynamic shapes, as arguments of `export`."""

    def program(self, options: Options, **export_options: Any) -> Program:
        """Export the module."""
        dynamic = export_options if {"dynamic_shapes", "examples"} & set(export_options) else self._dynamic()
        with stdout_to_stderr():
            keywords = {**option_keywords(options), **dynamic, **export_options}
            self._program = export(self.module(), *self.require_example(), **keywords)
        return self._program

    def calibration(self, files: Sequence[Path], options: Options) -> Sequence[Any]:
        """Return the arguments for the inputs in these files; none for the example arguments."""
        _check_calibration(files, options)
        if options.precision == FLOAT32 or not files:
            return []
        model = self.model(Options.of(options, precision=FLOAT32, verify=False))
        return [self.call(_feeds.read_inputs(path, model)) for path in files]

    def call(self, feeds: Mapping[str, Array]) -> CallArguments:
        """Return the example arguments with their tensors replaced by these inputs."""
        program = self._program or self.program(Options.of())
        call_spec = program.call_spec
        leaves = pytree.tree_leaves(self.require_example())
        for name, index in zip(program.inputs, call_spec.binding.inputs, strict=True):
            leaves[index] = _to_argument(leaves[index], feeds[name])
        args, kwargs = pytree.tree_unflatten(leaves, call_spec.in_spec)
        return tuple(args), dict(kwargs)

    def model(self, options: Options, **export_options: Any) -> ir.Model:
        """Export the module; weights stay in torch's memory."""
        return self.program(options, **export_options).model

    def _example_feeds(self, model: ir.Model) -> dict[str, Array] | None:
        program = self._program or self.program(Options.of())
        leaves = program.call_spec.flatten(*self.require_example())
        feeds = dict(zip(program.inputs, map(_to_array, leaves), strict=True))
        return {str(value.name): feeds[str(value.name)] for value in _feeds.inputs_of(model)}


class Factory(_TorchSource):
    """`package.module:name` or `path/file.py:name`: a function that returns a module, or the module itself."""

    kind = "module"

    @property
    def name(self) -> str:
        """Return the name after the colon."""
        return self.text.rpartition(":")[2]

    def module(self) -> Any:
        """Return the module that the factory returns."""
        return self._module_and_example[0]

    def example(self) -> CallArguments | None:
        """Return the example arguments that the factory returns."""
        return self._module_and_example[1]

    def _dynamic(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _module_and_example(self) -> tuple[Any, CallArguments | None]:
        location, _, name = self.text.rpartition(":")
        namespace = _import_module(location)
        if not hasattr(namespace, name):
            similar = difflib.get_close_matches(name, [x for x in vars(namespace) if not x.startswith("_")], n=1)
            hint = f"did you mean {location}:{similar[0]}?" if similar else "name a function or object defined there"
            raise SardonyxError(f"{location} has no {name!r}", hint=hint)
        return _split_module_and_arguments(self.text, _call_factory(self.text, getattr(namespace, name)))


class Exported(_TorchSource):
    """A file of torch.export.save."""

    kind = "pt2"

    @property
    def name(self) -> str:
        """Return the file's name without its suffix."""
        return Path(self.text).stem

    def module(self) -> Any:
        """The graph as a module, whose mode was settled when it was traced."""
        module = self._loaded.module()
        module.training = False
        return module

    def example(self) -> CallArguments | None:
        """Return the arguments it was exported with."""
        call = self._loaded.example_inputs
        return None if call is None else (tuple(call[0]), dict(call[1]))

    def _dynamic(self) -> dict[str, Any]:
        """Return the dynamic shapes of the exported program; sizes keep torch's names."""
        in_spec = self._loaded.call_spec.in_spec
        assert in_spec is not None
        user = set(self._loaded.graph_signature.user_inputs)
        nodes = [node for node in self._loaded.graph.nodes if node.op == "placeholder" and node.name in user]
        leaves = [_dynamic_sizes(node.meta.get("val")) for node in nodes]
        if not any(leaves):
            return {}
        args, kwargs = pytree.tree_unflatten(leaves, in_spec)
        return {"dynamic_shapes": (*args, *kwargs.values())}

    @cached_property
    def _loaded(self) -> torch.export.ExportedProgram:
        return _pt2.load(self.text)


def find_source(text: str) -> Source:
    """Return the model that a text names.

    >>> find_source("torch.nn:ReLU").kind
    'module'
    >>> find_source("model.pt")
    Traceback (most recent call last):
    sardonyx.errors.SardonyxError: 'model.pt' names no model
      next: a .pt file has weights without code: use package.module:factory, a function that loads them
    """
    suffix = Path(text).suffix
    if suffix in _FILES:
        if Path(text).is_dir():
            raise SardonyxError(f"{text} is a folder", hint=_FORMS)
        if not Path(text).is_file():
            raise SardonyxError(f"there is no file {text}", hint=_similar_file(Path(text)))
        return _FILES[suffix](text)
    location, colon, name = text.rpartition(":")
    if colon and location and name.isidentifier():
        return Factory(text)
    raise SardonyxError(f"{text!r} names no model", hint=_HINTS.get(suffix, _FORMS).format(text=text, suffix=suffix))


_FILES: Mapping[str, type[Source]] = {".onnx": OnnxFile, ".pt2": Exported}
_CHECKPOINT = "a {suffix} file has weights without code: use package.module:factory, a function that loads them"
_HINTS = {".py": "name the factory in it: {text}:factory"} | dict.fromkeys(
    (".pt", ".pth", ".bin", ".ckpt", ".safetensors"), _CHECKPOINT
)


def _similar_file(path: Path) -> str:
    files = sorted(str(x) for suffix in _FILES for x in path.parent.glob(f"*{suffix}")) if path.parent.is_dir() else []
    similar = difflib.get_close_matches(str(path), files, n=1)
    return f"did you mean {similar[0]}?" if similar else _FORMS


def _import_module(location: str) -> ModuleType:
    """Import a module by name or file; modules in the working directory are found, as with `python -m`."""
    path = Path(location)
    for folder in (path.resolve().parent, Path.cwd()) if path.suffix == ".py" else (Path.cwd(),):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        with stdout_to_stderr():
            return _from_file(path) if path.suffix == ".py" else importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name and f"{location}.".startswith(f"{error.name}."):
            raise SardonyxError(f"there is no module {error.name!r}", hint=_FORMS) from error
        raise MissingDependency(
            f"{location} needs the module {error.name}", hint=f"pip install {error.name}"
        ) from error
    except SardonyxError:
        raise
    except (Exception, SystemExit) as error:
        raise _wrap_error(f"{location} cannot be imported", error) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SardonyxError(f"there is no file {path}", hint=_FORMS)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look up their module
    spec.loader.exec_module(module)
    return module


def _call_factory(text: str, factory: Any) -> Any:
    """Call a factory with a fixed random seed; return modules and tuples as they are."""
    if isinstance(factory, (torch.nn.Module, tuple)):
        return factory
    if not callable(factory):
        raise SardonyxError(f"{text} is a {type(factory).__name__}, not a module or a factory", hint=_RETURN)
    required = _required_arguments(factory)
    if required:
        raise SardonyxError(
            f"{text} needs the argument {required[0]!r}", hint=f"use a factory without arguments; {_RETURN}"
        )
    torch.manual_seed(_SEED)
    try:
        with stdout_to_stderr():
            return factory()
    except ModuleNotFoundError as error:
        raise MissingDependency(f"{text} needs the module {error.name}", hint=f"pip install {error.name}") from error
    except SardonyxError:
        raise
    except (Exception, SystemExit) as error:
        raise _wrap_error(f"{text} failed", error) from error


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [x.name for x in parameters if x.default is x.empty and x.kind not in optional]


def _split_module_and_arguments(text: str, result: Any) -> tuple[Any, CallArguments | None]:
    """Split the result of a factory into the module and its example arguments."""
    if not isinstance(result, tuple):
        result = (result,)
    module, *rest = result
    if not callable(module) or len(rest) > 2:
        raise SardonyxError(f"{text} returns {', '.join(type(x).__name__ for x in result)}", hint=_RETURN)
    if not rest:
        return module, None
    args, kwargs = rest[0], rest[1] if len(rest) == 2 else {}
    args = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise SardonyxError(
            f"{text} returns arguments of types {type(args).__name__}, {type(kwargs).__name__}", hint=_RETURN
        )
    _check_call(text, module, args, kwargs)
    return module, (tuple(args), dict(kwargs))


def _check_call(text: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if the module's signature does not accept these arguments."""
    try:
        signature = inspect.signature(getattr(module, "forward", module))
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise SardonyxError(
            f"{text} returns arguments that its module does not accept: {error}", hint=_RETURN
        ) from error


def _wrap_error(message: str, error: BaseException) -> SardonyxError:
    return SardonyxError(
        f"{message}: {type(error).__name__}: {_first_line(error)}",
        where=_error_location(error),
        hint="sardonyx --debug … shows the traceback",
    )


def _error_location(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}, code: {(error.text or '').strip()}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}, code: {frame.line}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_calibration(files: Sequence[Path], options: Options) -> None:
    if files:
        options.require_precision("calibration")


def tensors(feeds: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Return inputs by name as tensors."""
    return {name: tensor(array) for name, array in feeds.items()}


def option_keywords(options: Options, **overrides: Any) -> dict[str, Any]:
    """Return options as keyword arguments."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)} | overrides


def in_memory(model: ir.Model) -> ir.Model:
    """Return a copy of a model whose external weights are memory-mapped, so that it can run from any folder."""
    return map_external_weights(model.clone())


def tensor(array: Array) -> torch.Tensor:
    """Return a tensor that shares an array's memory.

    >>> import ml_dtypes
    >>> tensor(np.ones(2, ml_dtypes.bfloat16))
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the array may be read-only; the tensor is not written
        if array.dtype == ir.DataType.BFLOAT16.numpy():
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)


def _dynamic_sizes(value: Any) -> dict[int, Any] | None:
    """Return the dynamic sizes of a traced argument: named if the symbol is a name, else AUTO."""
    if not isinstance(value, torch.Tensor):
        return None
    symbolic = {axis: str(size) for axis, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
    return {axis: x if x.isidentifier() else torch.export.Dim.AUTO for axis, x in symbolic.items()} or None


def _to_array(leaf: Any) -> Array:
    return dtypes.to_array(leaf.cpu() if isinstance(leaf, torch.Tensor) else torch.tensor([leaf]))


def _to_argument(leaf: Any, array: Array) -> Any:
    """Convert an array to an argument like `leaf`: a number, a tensor, or a complex tensor from pairs."""
    if not isinstance(leaf, torch.Tensor):
        return array.item()
    value = tensor(array).to(leaf.device)
    return torch.view_as_complex(value) if leaf.is_complex() else value
