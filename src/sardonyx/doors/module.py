"""`sardonyx.compile`: a module whose forward runs through ONNX, and which is otherwise the module it was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from sardonyx import fork
from sardonyx.doors.signatures import Build, CacheInfo, Dynamic, Signatures
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import Report


def compile(module: torch.nn.Module, *, dynamic: Dynamic = "auto", **options: Any) -> CompiledModule:
    """Wrap a module so that its forward runs through ONNX.

    A session is built for each new signature of a call: shapes, dtypes, devices, arguments that are no tensors. With
    `dynamic="auto"` a size that changes becomes dynamic at its second value, so that one session serves all others;
    with True every size is dynamic from the start, with False none ever is. The rest are options, see `Options`:
    `cache_size` sessions are kept.

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
    return CompiledModule(module, Options.of(options), dynamic)


class CompiledModule(torch.nn.Module):
    """What `sardonyx.compile` returns: the original module in everything but how its forward runs.

    Parameters, state, mode, attributes and methods are the original's, under the same names. A method of the original
    runs with the original's `forward` replaced, so what it calls is compiled too.
    """

    def __init__(self, original: torch.nn.Module, options: Options, dynamic: Dynamic) -> None:
        sessions = Signatures(original, options, dynamic)
        sessions.bridge = _bridge(sessions)
        vars(self).update({name: vars(original)[name] for name in _SHARED})
        vars(self).update(forward=sessions.bridge, _sessions=sessions, _bridging=_Bridging(sessions))

    @property
    def original(self) -> torch.nn.Module:
        """The module that was given, which shares everything with this one."""
        return self._core.module

    @property
    def report(self) -> Report:
        """What was compiled, and how."""
        return self._core.report

    @property
    def builds(self) -> Sequence[Build]:
        """Every session that was built: why, whether for many sizes, and in how many seconds."""
        return tuple(self._core.builds)

    @property
    def _core(self) -> Signatures:
        core: Signatures = vars(self)["_sessions"]
        return core

    def cache_info(self) -> CacheInfo:
        """How often a call found a session, and how many there are."""
        return self._core.info()

    def cache_clear(self) -> None:
        """Drop every session, and all that was learnt from the calls so far."""
        self._core.forget()

    def release(self) -> None:
        """Free the sessions and their memory; the next call builds one again."""
        self._core.release()

    def warm_up(self, *calls: Any, dtype: torch.dtype | None = None) -> CompiledModule:
        """Build the sessions for these calls ahead, and run each once.

        Each is a tuple of arguments, a dict of keywords, a pair of both, or one argument. Sizes stand for a tensor of
        ones: `(8, 128)`, of `dtype`, which is that of the parameters if none is given.
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
        """Call the module, hooks included: past torch's own way, which tracing in another thread changes for all."""
        call: Callable[..., Any] = self._call_impl
        return call(*args, **kwargs)

    # Everything else is the original's

    def __getattr__(self, name: str) -> Any:
        if (name.startswith("__") and name.endswith("__")) or "_sessions" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.original, name)
        if isinstance(found, MethodType) and found.__self__ is self.original:
            return _compiled_inside(self, found)
        return found

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
"""Where torch keeps parameters, buffers, modules and hooks: the same objects in both modules."""


def _bridge(sessions: Signatures) -> Callable[..., Any]:
    """A function that looks like the module's forward, and runs through its sessions."""

    @functools.wraps(sessions.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return sessions(args, kwargs)

    return forward


class _Bridging:
    """Puts the compiled forward in the place of the original's while any thread needs it there."""

    def __init__(self, sessions: Signatures) -> None:
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
                self._sessions.displace()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._sessions.restore()


def _compiled_inside(module: CompiledModule, method: MethodType) -> Callable[..., Any]:
    """A method of the original, in which calls of the original are compiled."""
    bridging: _Bridging = vars(module)["_bridging"]

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with bridging.active():
            return method(*args, **kwargs)

    @functools.wraps(method)
    def steps(*args: Any, **kwargs: Any) -> Any:
        with bridging.active():
            return (yield from method(*args, **kwargs))

    @functools.wraps(method)
    async def later(*args: Any, **kwargs: Any) -> Any:
        with bridging.active():
            return await method(*args, **kwargs)

    if inspect.isgeneratorfunction(method):
        return steps
    return later if inspect.iscoroutinefunction(method) else call


def _delegate(name: str) -> Callable[..., Any]:
    """A method of torch.nn.Module, called on the original, which may have another of that name."""

    @functools.wraps(getattr(torch.nn.Module, name))
    def call(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.original, name)(*args, **kwargs)
        return self if result is self.original else result

    return call


_OURS = {
    "forward",
    "_call_impl",
    "_wrapped_call_impl",
    "_slow_forward",
    "_get_name",
    "_maybe_warn_non_full_backward_hook",
}
for _name, _value in vars(torch.nn.Module).items():
    if callable(_value) and not isinstance(_value, type) and not _name.startswith("__") and _name not in _OURS:
        setattr(CompiledModule, _name, _delegate(_name))
