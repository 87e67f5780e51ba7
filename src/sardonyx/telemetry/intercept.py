"""`sardonyx.intercept`: see what reaches `forward`."""

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
    """Show the arguments of every call of `model.forward`, or hand them to a hook; then the call goes on as ever.

    Returns the model itself. `model.restore()` undoes it, and `model.record(path)` saves the arguments of calls too.
    `submodules` are patterns of names, as in `named_modules()`, of modules inside that are to be seen as well. With
    `results=True` results are shown too: a hook is then called twice, before `forward` and after it. What a hook
    returns is ignored; what it raises is raised.

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
    """While active, the model is intercepted; other interceptions of it stay.

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
    """Undo every interception of a model; one that was not intercepted stays as it is.

    `model.restore()` is the same, except for a model that has something of its own by that name.
    """
    found = _interception(model)
    for watch in list(found.names) if found else ():
        watch.end()


def show_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], hook: Hook | bool = True) -> None:
    """Show one call of a module, or hand it to the hook, without intercepting anything."""
    with _lock:
        numbers = _call_counts.setdefault(module, itertools.count())
    _hook(hook)(
        Call(module, "", next(numbers), bind_arguments(signature_of(module), args, kwargs), tuple(args), kwargs)
    )


_call_counts: WeakKeyDictionary[nn.Module, Iterator[int]] = WeakKeyDictionary()
_lock = threading.Lock()


def _hook(given: Hook | bool | None) -> Hook:
    if given is None or given is True:
        return print
    if not callable(given):
        raise OptionError(f"the hook of intercept is {given!r}", hint="use a function that takes the call")
    return given


# Interceptions


@dataclasses.dataclass(eq=False)
class _Watch:
    """One call of `intercept`: its hook, and the modules whose calls it sees, by name."""

    hook: Hook
    results: bool
    modules: Mapping[str, nn.Module]
    numbers: Mapping[str, Iterator[int]]

    def begin(self) -> None:
        """Intercept all of the modules, or none if one cannot be."""
        try:
            for name, module in self.modules.items():
                found = _interception(module) or _Interception.of(module)
                found.names[self] = name
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """See no more calls."""
        for module in self.modules.values():
            found = _interception(module)
            if found is None or self not in found.names:
                continue
            if len(found.names) == 1:
                found.undo(module)
            del found.names[self]


def _watch(model: nn.Module, hook: Hook | None, results: bool, submodules: str | Sequence[str]) -> _Watch:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"intercept takes a module of Python code, not {type(model).__name__}")
    modules = {"": model, **_matching_modules(model, submodules)}
    watch = _Watch(_hook(hook), results, modules, {name: itertools.count() for name in modules})
    watch.begin()
    return watch


def _matching_modules(model: nn.Module, patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    inside = {name: module for name, module in model.named_modules() if name}
    found: dict[str, nn.Module] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matching = {name: module for name, module in inside.items() if fnmatchcase(name, pattern)}
        if not matching:
            near = difflib.get_close_matches(pattern, inside, n=3)
            hint = "there is " + ", ".join(near or list(inside)[:3]) if inside else "it holds no other module"
            raise OptionError(f"no module in {type(model).__name__} is called {pattern!r}", hint=hint)
        found |= matching
    return found


class _Interception:
    """What is done at the calls of one module: who watches it, and what it was before.

    While a module is watched its class is a subclass of its own, with the same name, whose `forward` this is. So a
    method that is called through `self` is seen, a replica of DataParallel runs with its own weights, and dynamo
    notices the change by the class.
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
                hint="call the model once before",
            )
        found = cls(module)
        body = {**_subclass_body(found, declared_signature(module)), **_added_methods(module)}
        try:
            subclass = types.new_class(found.base.__name__, (found.base,), exec_body=lambda d: d.update(body))
            object.__setattr__(module, "__class__", subclass)  # some modules pass attributes on
        except Exception as error:  # the class may allow no subclass, in words of its own
            raise SardonyxError(
                f"{found.base.__name__} cannot be intercepted: {error}",
                hint="intercept the module around it, or one inside by submodules=",
            ) from error
        vars(module)[_ORIGINAL_FORWARD] = vars(module).pop("forward", None)
        return found

    def undo(self, module: nn.Module) -> None:
        """Make the module what it was."""
        if "_interception" not in vars(type(module)):
            raise SardonyxError(
                f"{self.base.__name__} got another class after it was intercepted",
                hint="undo that first, as torch.nn.utils.parametrize.remove_parametrizations does",
            )
        object.__setattr__(module, "__class__", self.base)
        _restore_forward(vars(module))

    def reduced(self, module: nn.Module) -> Any:
        """How to pickle or copy the module as what it is without interception.

        By the oldest protocol: the newer ones insist on the class that the module has at the moment.
        """
        plain: Any = object.__new__(self.base)
        object.__setattr__(plain, "__dict__", _restore_forward(dict(vars(module))))
        return plain.__reduce_ex__(1)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[_Watch, Call]]:
        """Tell everybody of a call; those that wait for its result."""
        arguments = bind_arguments(self.signature, args, kwargs)
        waiting = []
        for watch, name in list(self.names.items()):
            call = Call(module, name, next(watch.numbers[name]), arguments, args, dict(kwargs))
            watch.hook(call)
            if watch.results:
                waiting.append((watch, call))
        return waiting


_ORIGINAL_FORWARD = "_forward_of_its_own"
"""Where a `forward` that was set on the module itself is meanwhile: on the module, so that replicas have it too."""


def _restore_forward(attributes: dict[str, Any]) -> dict[str, Any]:
    own = attributes.pop(_ORIGINAL_FORWARD, None)
    if own is not None:
        attributes.setdefault("forward", own)
    return attributes


def _interception(module: nn.Module) -> _Interception | None:
    found: _Interception | None = getattr(type(module), "_interception", None)
    return found


def _notify_results(waiting: Sequence[tuple[_Watch, Call]], result: Any) -> None:
    for watch, call in waiting:
        watch.hook(dataclasses.replace(call, returned=True, result=result))


def _subclass_body(found: _Interception, signature: inspect.Signature) -> dict[str, Any]:
    """The parts of the subclass that a module becomes an instance of."""
    reason = "sardonyx.intercept looks at the arguments; with fullgraph=True use the option intercept instead"
    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    before, after = disable(found.before, reason=reason), disable(_notify_results, reason=reason)
    base = found.base

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self._forward_of_its_own
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
        "_interception": found,
        _ORIGINAL_FORWARD: False,  # of another object of the class, which was not intercepted
        "forward": forward,
        "__reduce_ex__": lambda self, protocol: found.reduced(self),
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }


def _record(self: nn.Module, path: str | PathLike[str], *, limit: int = 16) -> None:
    _watch(self, record(path, limit=limit), False, ())


_ADDED_METHODS: Mapping[str, Any] = {"restore": restore, "record": _record}
"""What a module can do while it is intercepted."""


def _added_methods(module: nn.Module) -> dict[str, Any]:
    """Those that hide nothing of the module's own."""
    own = {
        name: getattr(getattr(module, name, None), "__func__", None) for name in _ADDED_METHODS if hasattr(module, name)
    }
    hidden = [name for name, function in own.items() if function not in _ADDED_METHODS.values()]
    if hidden:
        log.warning("%s has a %s of its own: use sardonyx.diagnose's", type(module).__name__, " and a ".join(hidden))
    return {name: function for name, function in _ADDED_METHODS.items() if name not in hidden}


# Graphs of torch.compile


def show_graph_calls(run: Callable[..., Any], graph: torch.fx.GraphModule, hook: Hook | bool) -> Callable[..., Any]:
    """A compiled graph, each call of which is shown first, or handed to the hook; weights are left out."""
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
    """The graph's inputs that a caller gives, by number: no weights, no sizes of tensors that are inputs too."""
    found = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        source = getattr(node.meta.get("grapharg"), "source", None)
        text = "" if source is None else source.name
        if source is None or not (_WEIGHT.search(text) or hasattr(source, "prop")):
            found[index] = _readable_source(text) or node.name
    return found


def _readable_source(source: str) -> str:
    for pattern, words in _SOURCE_PATTERNS:
        source = pattern.sub(words, source)
    return source
