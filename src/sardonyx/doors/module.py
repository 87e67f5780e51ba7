"""`sardonyx.compile`: wrap a module so that its forward runs through ONNX."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from sardonyx import fork
from sardonyx.doors.session_cache import Build, CacheInfo, Dynamic, SessionCache
from sardonyx.errors import OptionError
from sardonyx.options import Options, check_keywords
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import Report


def compile(module: torch.nn.Module, *, dynamic: Dynamic = "auto", **options: Any) -> CompiledModule:
    """Wrap a module so that its forward runs through ONNX.

    A session is built for each new call signature: shapes, dtypes, devices, and the values of non-tensor arguments.
    With `dynamic="auto"` a size becomes dynamic when it first changes, so that one session serves all others; with
    True every size is dynamic from the start, with False none is. Other keywords are options, see `Options`; at most
    `cache_size` sessions are kept, the least recently used is dropped first.

    >>> model = compile(torch.nn.Linear(4, 2).eval(), cache_dir="")
    >>> with torch.no_grad():
    ...     [tuple(model(torch.ones(rows, 4)).shape) for rows in (3, 5, 7)]
    [(3, 2), (5, 2), (7, 2)]
    >>> model.cache_info()
    CacheInfo(hits=1, misses=2, size=1, maxsize=3, built=2)
    """
    if not isinstance(module, torch.nn.Module) or isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"sardonyx.compile takes a module of Python code, not {type(module).__name__}")
    if dynamic not in ("auto", True, False):
        raise OptionError(f"dynamic is {dynamic!r}", hint='use "auto", True or False')
    if isinstance(module, CompiledModule):
        module = module.original
    check_keywords(options, compile)
    return CompiledModule(module, Options.of(options), dynamic)


class CompiledModule(torch.nn.Module):
    """The result of `sardonyx.compile`: behaves like the original module, but its forward runs through ONNX.

    Parameters, state, mode, attributes and methods are the original's, under the same names. A method of the original,
    such as `generate`, calls the compiled forward.
    """

    def __init__(self, original: torch.nn.Module, options: Options, dynamic: Dynamic) -> None:
        sessions = SessionCache(original, options, dynamic)
        sessions.compiled_forward = _compiled_forward(sessions)
        vars(self).update({name: vars(original)[name] for name in _SHARED})
        vars(self).update(forward=sessions.compiled_forward, _sessions=sessions, _patch=_ForwardPatch(sessions))

    @property
    def original(self) -> torch.nn.Module:
        """The wrapped module; both share parameters, buffers and attributes."""
        return self._core.module

    @property
    def report(self) -> Report:
        """What was compiled, and how."""
        return self._core.report

    @property
    def builds(self) -> Sequence[Build]:
        """Every session that was built: the reason, whether its sizes are dynamic, and the seconds it took."""
        return tuple(self._core.builds)

    @property
    def _core(self) -> SessionCache:
        core: SessionCache = vars(self)["_sessions"]
        return core

    def cache_info(self) -> CacheInfo:
        """Hits, misses, the number of sessions in the LRU cache and its limit, and how many were built."""
        return self._core.info()

    def cache_clear(self) -> None:
        """Drop every session, and the record of which sizes are dynamic."""
        self._core.forget()

    def release(self) -> None:
        """Free the sessions and their memory; the next call builds one again."""
        self._core.release()

    def warm_up(self, *calls: Any, dtype: torch.dtype | None = None) -> CompiledModule:
        """Build the sessions for these calls in advance, and run each once.

        Each is a tuple of arguments, a dict of keywords, a pair of both, or one argument. Sizes such
        as `(8, 128)` stand for a tensor of ones of `dtype`, by default the dtype of the parameters.
        """
        for number, call in enumerate(calls, 1):
            args, kwargs = self._example(call, dtype)
            with show_progress(f"warming up, call {number} of {len(calls)}"), torch.no_grad():
                self(*args, **kwargs)
        return self

    def _example(self, call: Any, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if isinstance(call, Mapping):
            return (), call
        if isinstance(call, tuple) and call and all(isinstance(size, int) for size in call):
            first = next(self.original.parameters(), torch.empty(0))
            return (torch.ones(call, dtype=dtype or first.dtype, device=first.device),), {}
        if isinstance(call, tuple) and len(call) == 2 and isinstance(call[0], tuple) and isinstance(call[1], Mapping):
            return call
        return (call if isinstance(call, tuple) else (call,)), {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with its hooks, but not by `Module.__call__`, which tracing in another thread patches."""
        call: Callable[..., Any] = self._call_impl
        return call(*args, **kwargs)

    # Everything else is delegated to the original

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or "_sessions" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self.original, name)
        if isinstance(value, MethodType) and value.__self__ is self.original:
            return _compiled_method(self, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.original, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *dir(self.original)})

    def __repr__(self) -> str:
        return f"Compiled{self.original!r}"

    def __reduce__(self) -> Any:
        return CompiledModule, (self.original, self._core.options, self._core.dynamic)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


_SHARED = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, (dict, set))]
"""The dicts of parameters, buffers, modules and hooks, which both modules share."""


def _compiled_forward(sessions: SessionCache) -> Callable[..., Any]:
    """Return a function with the signature of the module's forward that runs its sessions."""

    @functools.wraps(sessions.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return sessions(args, kwargs)

    return forward


class _ForwardPatch:
    """Replaces the original's forward by the compiled one while any thread needs it."""

    def __init__(self, sessions: SessionCache) -> None:
        self._sessions, self._users, self._lock = sessions, 0, fork.Lock()

    @contextmanager
    def active(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._sessions.install_forward()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._sessions.restore_forward()


def _compiled_method(module: CompiledModule, method: MethodType) -> Callable[..., Any]:
    """Wrap a method of the original so that it calls the compiled forward."""
    patch: _ForwardPatch = vars(module)["_patch"]

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with patch.active():
            return method(*args, **kwargs)

    @functools.wraps(method)
    def call_generator(*args: Any, **kwargs: Any) -> Any:
        with patch.active():
            return (yield from method(*args, **kwargs))

    @functools.wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        with patch.active():
            return await method(*args, **kwargs)

    if inspect.isgeneratorfunction(method):
        return call_generator
    return call_async if inspect.iscoroutinefunction(method) else call


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method that calls the original's method of this name, which may override torch.nn.Module's."""

    @functools.wraps(getattr(torch.nn.Module, name))
    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.original, name)(*args, **kwargs)
        return self if result is self.original else result

    return call


_NOT_DELEGATED = {
    "forward",
    "_call_impl",
    "_wrapped_call_impl",
    "_slow_forward",
    "_get_name",
    "_maybe_warn_non_full_backward_hook",
}
for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and not isinstance(_value, type) and not _name.startswith("__") and _name not in _NOT_DELEGATED:
        setattr(CompiledModule, _name, _delegate(_name))
