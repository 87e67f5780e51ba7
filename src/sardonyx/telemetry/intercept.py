"""`sardonyx.intercept`: show or record the arguments that reach `forward`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import itertools
import logging
import re
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sardonyx.errors import OptionError, SardonyxError
from sardonyx.telemetry.calls import Call, Hook, bind_arguments, declared_signature, signature_of
from sardonyx.telemetry.recording import record

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


def intercept(model: M, hook: Hook | None = None, *, results: bool = False, submodules: str | Sequence[str] = ()) -> M:
    """Print the arguments of every call of `model.forward`, or pass the call to a hook; then run it unchanged.

    Returns the model itself. `model.restore()` undoes it, and `model.record(path)` also saves the arguments of calls.
    `submodules` are patterns of names, as in `named_modules()`, of submodules to intercept too. With `results=True`
    results are shown too: a hook is then called twice, before `forward` and after it. What a hook returns is ignored;
    what it raises is raised.

    >>> model = intercept(nn.Linear(2, 1))
    >>> _ = model(torch.tensor([[0.0, 1.0]]))
    call 0 of Linear
      input: float32[1, 2] cpu, 0 to 1, mean 0.5: [[0, 1]]
    >>> model.restore()
    """
    _watch(model, hook, results, submodules)
    return model


@contextmanager
def intercepting(
    model: M, hook: Hook | None = None, *, results: bool = False, submodules: str | Sequence[str] = ()
) -> Iterator[M]:
    """While active, the model is intercepted; other interceptions of it stay active.

    >>> calls = []
    >>> with intercepting(nn.Linear(2, 1), calls.append) as model:
    ...     _ = model(torch.ones(3, 2))
    >>> calls[0].arguments["input"].shape
    torch.Size([3, 2])
    """
    watch = _watch(model, hook, results, submodules)
    try:
        yield model
    finally:
        watch.end()


def restore(model: nn.Module) -> None:
    """Undo every interception of a model, if any.

    `model.restore()` does the same, unless the model defines a `restore` itself.
    """
    interception = _interception(model)
    for watch in list(interception.names) if interception else ():
        watch.end()


def show_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], hook: Hook | bool = True) -> None:
    """Print one call of a module, or pass it to the hook, without intercepting anything."""
    with _lock:
        numbers = _call_counts.setdefault(module, itertools.count())
    arguments = bind_arguments(signature_of(module), args, kwargs)
    _hook(hook)(Call(module, "", next(numbers), arguments, tuple(args), kwargs))


_call_counts: WeakKeyDictionary[nn.Module, Iterator[int]] = WeakKeyDictionary()
_lock = threading.Lock()


def _hook(hook: Hook | bool | None) -> Hook:
    if hook is None or hook is True:
        return print
    if not callable(hook):
        raise OptionError(f"the hook of intercept is {hook!r}", hint="use a function that takes the call")
    return hook


# Interceptions


@dataclasses.dataclass(eq=False)
class _Watch:
    """One call of `intercept`: its hook, and the modules it watches, by name."""

    hook: Hook
    results: bool
    modules: Mapping[str, nn.Module]
    numbers: Mapping[str, Iterator[int]]

    def begin(self) -> None:
        """Intercept all modules, or none if one cannot be intercepted."""
        try:
            for name, module in self.modules.items():
                interception = _interception(module) or _Interception.of(module)
                interception.names[self] = name
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Stop watching."""
        for module in self.modules.values():
            interception = _interception(module)
            if interception is None or self not in interception.names:
                continue
            if len(interception.names) == 1:
                interception.undo(module)
            del interception.names[self]


def _watch(model: nn.Module, hook: Hook | None, results: bool, submodules: str | Sequence[str]) -> _Watch:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"intercept takes a module written in Python, not {type(model).__name__}")
    modules = {"": model, **_matching_modules(model, submodules)}
    watch = _Watch(_hook(hook), results, modules, {name: itertools.count() for name in modules})
    watch.begin()
    return watch


def _matching_modules(model: nn.Module, patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    submodules = {name: module for name, module in model.named_modules() if name}
    matches: dict[str, nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = {name: module for name, module in submodules.items() if fnmatchcase(name, pattern)}
        if not matching:
            similar = difflib.get_close_matches(pattern, submodules, n=3)
            known = ", ".join(similar or list(submodules)[:3])
            hint = f"it has {known}" if submodules else "it has no submodules"
            raise OptionError(f"{type(model).__name__} has no submodule {pattern!r}", hint=hint)
        matches |= matching
    return matches


class _Interception:
    """The interception of one module: its watches, and its original class.

    While a module is watched, its class is replaced by a subclass with the same name that overrides `forward`. So calls
    through `self` are seen, replicas of DataParallel use their own weights, and dynamo's guards detect the change.
    """

    def __init__(self, module: nn.Module) -> None:
        self.base, self.signature = type(module), signature_of(module)
        self.names: dict[_Watch, str] = {}

    @classmethod
    def of(cls, module: nn.Module) -> _Interception:
        """Begin to intercept a module."""
        if getattr(module, "cls_to_become", None) is not None:
            raise SardonyxError(
                f"{type(module).__name__} cannot be intercepted: its first call will change its class",
                hint="call the model once first",
            )
        interception = cls(module)
        base = interception.base
        body = {**_subclass_body(interception, declared_signature(module)), **_added_methods(module)}
        try:
            subclass = types.new_class(base.__name__, (base,), exec_body=lambda d: d.update(body))
            object.__setattr__(module, "__class__", subclass)  # bypasses __setattr__ of wrappers
        except Exception as error:  # a class may refuse subclasses
            raise SardonyxError(
                f"{base.__name__} cannot be intercepted: {error}",
                hint="intercept the module that contains it, or a submodule by submodules=",
            ) from error
        vars(module)[_ORIGINAL_FORWARD] = vars(module).pop("forward", None)
        return interception

    def undo(self, module: nn.Module) -> None:
        """Restore the module's class and `forward`."""
        if "_interception" not in vars(type(module)):
            raise SardonyxError(
                f"{self.base.__name__} was given another class after it was intercepted",
                hint="undo that first, as torch.nn.utils.parametrize.remove_parametrizations does",
            )
        object.__setattr__(module, "__class__", self.base)
        _restore_forward(vars(module))

    def reduce(self, module: nn.Module) -> Any:
        """Pickle or copy the module as it is without interception.

        Uses protocol 1: newer ones insist on the class that the module has at the moment.
        """
        plain: Any = object.__new__(self.base)
        object.__setattr__(plain, "__dict__", _restore_forward(dict(vars(module))))
        return plain.__reduce_ex__(1)

    def notify(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[_Watch, Call]]:
        """Call the hooks before `forward`; return the watches that want the result, with their calls."""
        arguments = bind_arguments(self.signature, args, kwargs)
        waiting = []
        for watch, name in list(self.names.items()):
            call = Call(module, name, next(watch.numbers[name]), arguments, args, dict(kwargs))
            watch.hook(call)
            if watch.results:
                waiting.append((watch, call))
        return waiting


_ORIGINAL_FORWARD = "_sardonyx_forward"
"""Attribute with a `forward` that was set on the instance: on the module, so that replicas have it too."""


def _restore_forward(attributes: dict[str, Any]) -> dict[str, Any]:
    own = attributes.pop(_ORIGINAL_FORWARD, None)
    if own is not None:
        attributes.setdefault("forward", own)
    return attributes


def _interception(module: nn.Module) -> _Interception | None:
    interception: _Interception | None = getattr(type(module), "_interception", None)
    return interception


def _notify_results(waiting: Sequence[tuple[_Watch, Call]], result: Any) -> None:
    for watch, call in waiting:
        watch.hook(dataclasses.replace(call, returned=True, result=result))


def _subclass_body(interception: _Interception, signature: inspect.Signature) -> dict[str, Any]:
    """Return the attributes of the subclass that replaces a module's class."""
    reason = "sardonyx.intercept reads the arguments; with fullgraph=True use the option intercept instead"
    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    before, after = disable(interception.notify, reason=reason), disable(_notify_results, reason=reason)
    base = interception.base

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self._sardonyx_forward
        run = own if callable(own) else functools.partial(base.forward, self)
        if own is False or torch.compiler.is_exporting():
            return run(*args, **kwargs)
        waiting = before(self, args, kwargs)
        result = run(*args, **kwargs)
        if waiting:
            after(waiting, result)
        return result

    functools.update_wrapper(forward, base.forward, updated=())
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__dict__["__signature__"] = signature.replace(parameters=[itself, *signature.parameters.values()])
    return {
        "_interception": interception,
        _ORIGINAL_FORWARD: False,  # for instances that are not intercepted
        "forward": forward,
        "__reduce_ex__": lambda self, protocol: interception.reduce(self),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }


def _record(self: nn.Module, path: str | PathLike[str], *, limit: int = 16) -> None:
    _watch(self, record(path, limit=limit), False, ())


_ADDED_METHODS: Mapping[str, Any] = {"restore": restore, "record": _record}
"""Methods that a module gets while it is intercepted."""


def _added_methods(module: nn.Module) -> dict[str, Any]:
    """Return the methods to add: those that the module does not define itself."""
    own = {name: getattr(module, name) for name in _ADDED_METHODS if hasattr(module, name)}
    hidden = [name for name, x in own.items() if getattr(x, "__func__", None) not in _ADDED_METHODS.values()]
    if hidden:
        log.warning("%s defines its own %s: use that of sardonyx.diagnose", type(module).__name__, " and ".join(hidden))
    return {name: function for name, function in _ADDED_METHODS.items() if name not in hidden}


# Graphs of torch.compile


def show_graph_calls(run: Callable[..., Any], graph: torch.fx.GraphModule, hook: Hook | bool) -> Callable[..., Any]:
    """Wrap a compiled graph so that each call is printed first, or passed to the hook; weights are left out."""
    hook, names, numbers = _hook(hook), _input_names(graph), itertools.count()
    name = f"graph {torch._guards.CompileContext.current_compile_id()}"

    def call(*args: Any) -> Any:
        arguments = {name: args[index] for index, name in names.items()}
        hook(Call(graph, name, next(numbers), arguments, args, {}))
        return run(*args)

    return call


_SOURCE_PATTERNS = (
    (re.compile(r"\b[LG]\['(\w+)'\]"), r"\1"),  # a local or a global variable
    (re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]"), r".\1"),
)
_WEIGHT = re.compile(r"\._(?:parameters|buffers)\[")


def _input_names(graph: torch.fx.GraphModule) -> dict[int, str]:
    """Return the names of a graph's inputs that the caller passes, by index: no weights, no sizes of tensors."""
    names = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        text = "" if source is None else source.name
        if source is None or not (_WEIGHT.search(text) or hasattr(source, "prop")):
            names[index] = _readable_source(text) or node.name
    return names


def _readable_source(source: str) -> str:
    for pattern, replacement in _SOURCE_PATTERNS:
        source = pattern.sub(replacement, source)
    return source
