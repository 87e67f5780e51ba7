"""A model in one of the forms that a command line names: an ONNX file, an exported program, or a factory in Python."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch.utils import _pytree as pytree

from sardonyx import dtypes
from sardonyx.cli import _feeds, _pt2
from sardonyx.cli._feeds import Array
from sardonyx.cli._messages import stdout_to_stderr
from sardonyx.doors.export import export
from sardonyx.doors.optimize import optimize
from sardonyx.doors.program import Program
from sardonyx.errors import MissingDependency, OptionError, SardonyxError
from sardonyx.model_files import find_fault, load_model
from sardonyx.options import Options

SourceKind: TypeAlias = Literal["module", "pt2", "onnx"]
CallArguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_FORMS_HINT = "give model.onnx, a .pt2 file of torch.export.save, or package.module:factory, or path/file.py:factory"
_RETURN_HINT = "let it return (module, args) or (module, args, kwargs)"
_SEED = 0
MODEL_KEY = "sardonyx.model"
"""Under which the context of a command has its model."""


class Source(ABC):
    """A model as it is given: a factory of modules, a file of torch.export, or an ONNX file."""

    kind: SourceKind

    def __init__(self, text: str) -> None:
        self.text = text

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name, for files and reports."""

    @abstractmethod
    def module(self) -> Any:
        """The module, or another function of tensors; an error for an ONNX file, which has none."""

    @abstractmethod
    def example(self) -> CallArguments | None:
        """Arguments to call the module with, where it comes with some."""

    def called_with(self) -> CallArguments:
        """Those arguments, or an error where there are none."""
        call = self.example()
        if call is None:
            raise SardonyxError(f"{self.text} gives a module without arguments to export it with", hint=_RETURN_HINT)
        return call

    @abstractmethod
    def model(self, options: Options, **export_options: Any) -> ir.Model:
        """The ONNX model, exported where it is none yet; its weights stay where they are."""

    @abstractmethod
    def program(self, options: Options, **export_options: Any) -> Program:
        """The model after the rewrite rules, as `sardonyx.export` or `sardonyx.optimize` gives it."""

    @abstractmethod
    def call(self, feeds: Mapping[str, Array]) -> CallArguments:
        """The arguments with which the module is given these inputs of the ONNX model."""

    def feeds(
        self, inputs: Path | None, sizes: Mapping[str, int], seed: int, model: ir.Model | None = None
    ) -> dict[str, Array]:
        """Inputs by their names in the ONNX model: of a file, else those it comes with, else random ones."""
        model = model or self.model(Options.of())
        if inputs is not None and sizes:
            raise OptionError(f"{inputs} says the sizes already", hint="leave out --size, or --inputs")
        if inputs is not None:
            return _feeds.read_inputs(inputs, model)
        own = None if sizes else self._own(model)
        return own or _feeds.random_inputs(model, sizes, seed)

    def _own(self, model: ir.Model) -> dict[str, Array] | None:
        """The inputs that the model comes with."""
        return None

    def fault(self) -> str | None:
        """What is wrong with the model itself, where that can be told without running it."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"


class OnnxFile(Source):
    """A file that is ONNX already."""

    kind = "onnx"

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.text).stem

    def module(self) -> Any:
        """There is none."""
        raise SardonyxError(
            f"{self.text} is an ONNX file, and this needs the module in torch",
            hint="give package.module:factory, or a .pt2 file of torch.export.save",
        )

    def example(self) -> CallArguments | None:
        """There is none."""
        return None

    def model(self, options: Options, **export_options: Any) -> ir.Model:
        """The file as it is, with weights left on disk where it has them in files of their own."""
        if export_options:
            raise OptionError(f"{self.text} is exported already, so {', '.join(export_options)} cannot be chosen")
        return self._loaded

    def program(self, options: Options, **export_options: Any) -> Program:
        """The file after the rewrite rules."""
        return optimize(self.model(options, **export_options), **option_keywords(options))

    def call(self, feeds: Mapping[str, Array]) -> CallArguments:
        """The inputs in order, for the program."""
        return tuple(tensor(feeds[str(value.name)]) for value in _feeds.inputs_of(self._loaded)), {}

    def fault(self) -> str | None:
        """What ONNX's checker says of the file."""
        return find_fault(self.text)

    @cached_property
    def _loaded(self) -> ir.Model:
        return load_model(self.text)


class _TorchSource(Source):
    """A model that torch has: it is exported once, and again only where something else is asked for."""

    _program: Program | None = None

    @abstractmethod
    def _dynamic(self) -> dict[str, Any]:
        """What is dynamic, as `export` takes it, where nothing is said."""

    def program(self, options: Options, **export_options: Any) -> Program:
        """The module as `sardonyx.export` gives it."""
        told = export_options if {"dynamic_shapes", "examples"} & set(export_options) else self._dynamic()
        with stdout_to_stderr():
            self._program = export(
                self.module(), *self.called_with(), **{**option_keywords(options), **told, **export_options}
            )
        return self._program

    def call(self, feeds: Mapping[str, Array]) -> CallArguments:
        """The example's arguments, with these in the place of its tensors."""
        program = self._program or self.program(Options.of())
        calling = program.calling
        leaves = pytree.tree_leaves(self.called_with())
        for name, place in zip(program.inputs, calling.binding.inputs, strict=True):
            leaves[place] = _to_argument(leaves[place], feeds[name])
        args, kwargs = pytree.tree_unflatten(leaves, calling.in_spec)
        return tuple(args), dict(kwargs)

    def model(self, options: Options, **export_options: Any) -> ir.Model:
        """The module exported, with its weights in torch's memory."""
        return self.program(options, **export_options).model

    def _own(self, model: ir.Model) -> dict[str, Array] | None:
        program = self._program or self.program(Options.of())
        leaves = program.calling.flatten(*self.called_with())
        given = dict(zip(program.inputs, map(_to_array, leaves), strict=True))
        return {str(value.name): given[str(value.name)] for value in _feeds.inputs_of(model)}


class Factory(_TorchSource):
    """`package.module:name` or `path/file.py:name`: a function that gives a module, or the module itself."""

    kind = "module"

    @property
    def name(self) -> str:
        """The name after the colon."""
        return self.text.rpartition(":")[2]

    def module(self) -> Any:
        """The module that the factory gives."""
        return self._given[0]

    def example(self) -> CallArguments | None:
        """The arguments beside it."""
        return self._given[1]

    def _dynamic(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _given(self) -> tuple[Any, CallArguments | None]:
        place, _, name = self.text.rpartition(":")
        held = _import_module(place)
        if not hasattr(held, name):
            near = difflib.get_close_matches(name, [x for x in vars(held) if not x.startswith("_")], n=1)
            hint = (
                f"did you mean {place}:{near[0]}?" if near else "give a function, or an object, that is defined there"
            )
            raise SardonyxError(f"{place} has no {name!r}", hint=hint)
        return _split_module_and_arguments(self.text, _call_factory(self.text, getattr(held, name)))


class Exported(_TorchSource):
    """A file that torch.export.save wrote."""

    kind = "pt2"

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return Path(self.text).stem

    def module(self) -> Any:
        """The graph as a module, whose mode was settled when it was traced."""
        module = self._loaded.module()
        module.training = False
        return module

    def example(self) -> CallArguments | None:
        """The arguments it was exported with."""
        call = self._loaded.example_inputs
        return None if call is None else (tuple(call[0]), dict(call[1]))

    def _dynamic(self) -> dict[str, Any]:
        """What was dynamic then; sizes keep the names that torch gave them."""
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
    """The model that a text names.

    >>> source("torch.nn:ReLU").kind
    'module'
    >>> source("model.pt")
    Traceback (most recent call last):
    sardonyx.errors.SardonyxError: 'model.pt' names no model
      next: a .pt file has weights without the code: give package.module:factory, a function that loads them
    """
    suffix = Path(text).suffix
    if suffix in _FILES:
        if Path(text).is_dir():
            raise SardonyxError(f"{text} is a folder", hint=_FORMS_HINT)
        if not Path(text).is_file():
            raise SardonyxError(f"there is no file {text}", hint=_similar_file(Path(text)))
        return _FILES[suffix](text)
    place, colon, name = text.rpartition(":")
    if colon and place and name.isidentifier():
        return Factory(text)
    raise SardonyxError(
        f"{text!r} names no model", hint=_HINTS_BY_SUFFIX.get(suffix, _FORMS_HINT).format(text=text, suffix=suffix)
    )


_FILES: Mapping[str, type[Source]] = {".onnx": OnnxFile, ".pt2": Exported}
_CHECKPOINT = "a {suffix} file has weights without the code: give package.module:factory, a function that loads them"
_HINTS_BY_SUFFIX = {".py": "say what in it gives the model: {text}:factory"} | dict.fromkeys(
    (".pt", ".pth", ".bin", ".ckpt", ".safetensors"), _CHECKPOINT
)


def _similar_file(path: Path) -> str:
    found = sorted(str(x) for suffix in _FILES for x in path.parent.glob(f"*{suffix}")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), found, n=1)
    return f"did you mean {near[0]}?" if near else _FORMS_HINT


def _import_module(place: str) -> ModuleType:
    """A module by its name or its file; those in the working directory are found, as `python -m` finds them."""
    path = Path(place)
    for folder in (path.resolve().parent, Path.cwd()) if path.suffix == ".py" else (Path.cwd(),):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    try:
        with stdout_to_stderr():
            return _from_file(path) if path.suffix == ".py" else importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and f"{place}.".startswith(f"{error.name}."):
            raise SardonyxError(f"there is no module {error.name!r}", hint=_FORMS_HINT) from error
        raise MissingDependency(f"{place} needs the module {error.name}", hint=f"pip install {error.name}") from error
    except SardonyxError:
        raise
    except (Exception, SystemExit) as error:
        raise _wrap_error(f"{place} cannot be imported", error) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SardonyxError(f"there is no file {path}", hint=_FORMS_HINT)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, made)  # dataclasses and pickles look their module up
    spec.loader.exec_module(made)
    return made


def _call_factory(text: str, found: Any) -> Any:
    """What a factory gives, with the same random numbers each time; an object is what it is."""
    if isinstance(found, (torch.nn.Module, tuple)):
        return found
    if not callable(found):
        raise SardonyxError(f"{text} is a {type(found).__name__}, and gives no module", hint=_RETURN_HINT)
    needed = _required_arguments(found)
    if needed:
        raise SardonyxError(
            f"{text} needs the argument {needed[0]!r}", hint=f"give one without arguments; {_RETURN_HINT}"
        )
    torch.manual_seed(_SEED)
    try:
        with stdout_to_stderr():
            return found()
    except ModuleNotFoundError as error:
        raise MissingDependency(f"{text} needs the module {error.name}", hint=f"pip install {error.name}") from error
    except SardonyxError:
        raise
    except (Exception, SystemExit) as error:
        raise _wrap_error(f"{text} failed", error) from error


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments without which a function cannot be called."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [x.name for x in parameters if x.default is x.empty and x.kind not in optional]


def _split_module_and_arguments(text: str, made: Any) -> tuple[Any, CallArguments | None]:
    """A module, and the arguments beside it."""
    if not isinstance(made, tuple):
        made = (made,)
    module, *rest = made
    if not callable(module) or len(rest) > 2:
        raise SardonyxError(f"{text} gives {', '.join(type(x).__name__ for x in made)}", hint=_RETURN_HINT)
    if not rest:
        return module, None
    args, kwargs = rest[0], rest[1] if len(rest) == 2 else {}
    args = (args,) if isinstance(args, torch.Tensor) else args
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise SardonyxError(
            f"{text} gives arguments that are {type(args).__name__}, {type(kwargs).__name__}", hint=_RETURN_HINT
        )
    _check_call(text, module, args, kwargs)
    return module, (tuple(args), dict(kwargs))


def _check_call(text: str, module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """The module takes these arguments, as far as its signature tells."""
    try:
        signature = inspect.signature(getattr(module, "forward", module))
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise SardonyxError(
            f"{text} gives arguments that its module does not take: {error}", hint=_RETURN_HINT
        ) from error


def _wrap_error(what: str, error: BaseException) -> SardonyxError:
    return SardonyxError(
        f"{what}: {type(error).__name__}: {_first_line(error)}",
        where=_error_location(error),
        hint="sardonyx --debug … shows the whole traceback",
    )


def _error_location(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}, code: {(error.text or '').strip()}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}, code: {frame.line}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def option_keywords(options: Options, **instead: Any) -> dict[str, Any]:
    """Options as keyword arguments."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)} | instead


def in_memory(model: ir.Model) -> ir.Model:
    """A copy of a model whose weights in files of their own are mapped into memory, wherever it is run."""
    made = model.clone()
    for name, value in made.graph.initializers.items():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = TorchTensor(tensor(value.const_value.numpy()), name=name)
    return made


def tensor(array: Array) -> torch.Tensor:
    """A tensor over an array's memory.

    >>> import ml_dtypes
    >>> tensor(np.ones(2, ml_dtypes.bfloat16))
    tensor([1., 1.], dtype=torch.bfloat16)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nobody writes to a file that is mapped
        if array.dtype == ir.DataType.BFLOAT16.numpy():
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)


def _dynamic_sizes(value: Any) -> dict[int, Any] | None:
    """Which sizes of a traced argument are dynamic: by name where it is one, else for torch to find out."""
    if not isinstance(value, torch.Tensor):
        return None
    symbolic = {axis: str(size) for axis, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
    return {axis: x if x.isidentifier() else torch.export.Dim.AUTO for axis, x in symbolic.items()} or None


def _to_array(leaf: Any) -> Array:
    return dtypes.to_array(leaf.cpu() if isinstance(leaf, torch.Tensor) else torch.tensor([leaf]))


def _to_argument(leaf: Any, array: Array) -> Any:
    """An argument in the place of another: a number, a complex tensor that the model has as pairs, or a tensor."""
    if not isinstance(leaf, torch.Tensor):
        return array.item()
    given = tensor(array).to(leaf.device)
    return torch.view_as_complex(given) if leaf.is_complex() else given
