"""LRU cache of the sessions of a compiled module, with the fallback to torch.compile."""

from __future__ import annotations

import gc
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.capture.arguments import Arguments, ResultContext, copy_arguments
from sardonyx.capture.attributes import Attributes, Mask, first_difference
from sardonyx.capture.module_trace import FlatModule, ModuleTrace, find_tensor, trace
from sardonyx.doors import module_store
from sardonyx.doors.dynamo import sardonyx as backend
from sardonyx.errors import CaptureError
from sardonyx.options import Options
from sardonyx.pipeline import compile_graph
from sardonyx.run.builds import MODULE
from sardonyx.run.recompute import Recompute
from sardonyx.telemetry.intercept import show_call
from sardonyx.telemetry.report import Fallback, GraphReport, Report, collecting

log = logging.getLogger(__name__)

_REMEMBERED_SIGNATURES = 256
"""Limit of signatures whose sizes and errors are cached."""
_ISOLATED: dict[str, Any] = {
    name: True for name in ("isolate_recompiles",) if name in inspect.signature(torch.compile).parameters
}
"""Count recompilations per module if torch supports it; else all modules of a class share one limit."""

Dynamic: TypeAlias = Literal["auto"] | bool


class CacheInfo(NamedTuple):
    """Hits and misses of the cache, its size and limit, and the number of sessions built."""

    hits: int
    misses: int
    size: int
    maxsize: int
    built: int


class Build(NamedTuple):
    """One session that was built: the reason, whether its sizes are dynamic, and the seconds it took."""

    reason: str
    dynamic: bool
    from_disk: bool
    seconds: float


@dataclass
class _State:
    """The module's state when it was last read."""

    attributes: Attributes
    training: bool
    hooked: str | None
    """The name of a submodule with hooks, if any."""


@dataclass(eq=False)
class _ModuleSession:
    key: tuple[Any, ...]
    sizes: tuple[int, ...]
    traced: ModuleTrace
    run: Callable[[list[Any]], Sequence[Any]]
    random: bool
    state: _State | None = None
    bound: list[Any] = field(default_factory=list)
    """The arguments of the graph, with the weights of `state`; None for inputs."""
    first: tuple[Arguments, list[torch.Tensor]] | None = None
    """A call whose outputs are already computed."""
    callback: Callable[[], None] | None = None
    """Called after the first call."""

    @property
    def should_rebuild(self) -> bool:
        """Whether another session should replace it."""
        return isinstance(self.run, module_store.StoredModel) and self.run.should_rebuild

    def bind(self, state: _State, module: torch.nn.Module) -> None:
        """Bind the current weights of the module."""
        count = len(self.traced.weights) + len(self.traced.inputs)
        bound: list[Any] = [None] * count
        for index, weight in self.traced.weights.items():
            bound[index] = find_tensor(module, weight) if isinstance(weight, str) else weight
        self.bound, self.state = bound, state

    def outputs(self, arguments: Arguments) -> list[torch.Tensor]:
        """Run the graph for a call."""
        first, self.first = self.first, None
        if first is not None and first[0] is arguments:
            return first[1]
        flat: list[Any] = [*arguments.dense(), *(arguments.integers[i] for i in self.traced.dynamic)]
        args = list(self.bound)
        for index, place in self.traced.inputs.items():
            args[index] = flat[place]
        with torch.no_grad():
            outputs = list(self.run(args))
        callback, self.callback = self.callback, None
        if callback is not None:
            callback()
        return outputs


class _BuildLock:
    """A reentrant lock for building: torch.export changes modules and globals of torch that all threads see."""

    def __init__(self) -> None:
        self.forked()
        fork.register(self)

    def forked(self) -> None:
        """In a child process: reset the lock."""
        self._lock, self._depth, self._owner = threading.RLock(), 0, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = 0
        self._lock.release()

    def is_held_by_another_thread(self) -> bool:
        """Whether another thread is building."""
        return self._owner not in (0, threading.get_ident())


_BUILD_LOCK = _BuildLock()


def _is_tracing() -> bool:
    """Whether this thread is tracing; waits while another thread is."""
    while torch.compiler.is_compiling():
        if not _BUILD_LOCK.is_held_by_another_thread():
            return torch.compiler.is_compiling()
        with _BUILD_LOCK:
            pass
    return False


class SessionCache:
    """Calls a module through an LRU cache of at most `cache_size` sessions."""

    def __init__(self, module: torch.nn.Module, options: Options, dynamic: Dynamic) -> None:
        self.module, self.options, self.dynamic = module, options, dynamic
        self.report = Report()
        self.builds: list[Build] = []
        self.compiled_forward: Callable[..., Any] | None = None
        self._replaced_forward: Any = None
        self._sessions = LRU[_ModuleSession](options.cache_size)
        self._size_history: LRU[tuple[tuple[int, ...], set[int]]] = LRU(_REMEMBERED_SIGNATURES)
        self._errors: LRU[CaptureError] = LRU(_REMEMBERED_SIGNATURES)
        self._rejected: LRU[bool] = LRU(_REMEMBERED_SIGNATURES)
        self._state: _State | None = None
        self._hits = self._misses = self._built = 0
        self._lock = fork.Lock()
        self._dynamo_compiled: tuple[Any, Callable[..., Any]] | None = None

    # A call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module."""
        if torch.compiler.is_dynamo_compiling() or _is_tracing():  # let an outer trace see into the module
            return self.forward(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CaptureError(
                "a compiled module is called inside a transform of torch.func, such as vmap or grad",
                hint="transform the original module, `.original`",
            )
        if self.options.intercept:
            show_call(self.module, args, kwargs, self.options.intercept)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        prepared = self._arguments_and_session((args, kwargs))
        if prepared is None:
            return self._run_by_dynamo(args, kwargs)
        arguments, state, session = prepared
        wants_grad = torch.is_grad_enabled() and self._wants_grad(arguments)
        if wants_grad and session.random:  # its forward cannot be recomputed
            return self._run_by_dynamo(args, kwargs)
        try:
            outputs = (
                self._with_gradients(session, arguments, state, (args, kwargs))
                if wants_grad
                else session.outputs(arguments)
            )
        except module_store.StaleModel:
            self._reject(session)
            return self._run(args, kwargs)
        numbers = session.traced.numbers(arguments.sizes())
        return session.traced.results.rebuild(ResultContext(outputs, arguments, numbers))

    def _arguments_and_session(self, call: Any) -> tuple[Arguments, _State, _ModuleSession] | None:
        """Return the flattened arguments, the state and the session of a call; None if torch.compile has to run it."""
        training = False
        try:
            arguments = Arguments.of(call)
            state = self._state_now()
            training = state.training
            if training and torch.is_grad_enabled() and self._wants_grad(arguments):
                return None
            return arguments, state, self._session(arguments, state, call)
        except CaptureError as error:
            self._raise_or_note(error, training)
            return None

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward, even while the compiled one replaces it."""
        own = vars(self.module).get("forward")
        own = self._replaced_forward if own is self.compiled_forward else own
        bound: Callable[..., Any] = own or type(self.module).forward.__get__(self.module)
        return bound

    def install_forward(self) -> None:
        """Replace the module's forward by the compiled one."""
        self._replaced_forward = vars(self.module).get("forward")
        vars(self.module)["forward"] = self.compiled_forward

    def restore_forward(self) -> None:
        """Restore the module's own forward, unless it was replaced by another meanwhile."""
        if vars(self.module).get("forward") is self.compiled_forward:
            del vars(self.module)["forward"]
            if self._replaced_forward is not None:
                vars(self.module)["forward"] = self._replaced_forward
        self._replaced_forward = None

    def _state_now(self) -> _State:
        state = self._state
        if state is None or not state.attributes.unchanged():
            with _BUILD_LOCK:  # tracing replaces weights temporarily
                state = self._state = self._read_state()
        return state

    def _read_state(self) -> _State:
        attributes = Attributes(
            self.module, Mask(self.module, "forward", self.compiled_forward, lambda: self._replaced_forward)
        )
        for key in self._known_states():
            if key == attributes.key:
                attributes.key = key  # the same object: compared by identity
        modules = list(self.module.named_modules())
        hooked = (name for name, m in modules if name and not all(map(_is_traceable_hook, _hooks(m))))
        return _State(attributes, any(m.training for _, m in modules), next(hooked, None))

    def _known_states(self) -> list[Any]:
        with self._lock:
            return [session.key[1] for _, session in self._sessions.items()]

    def _session(self, arguments: Arguments, state: _State, call: Any) -> _ModuleSession:
        sizes = arguments.sizes()
        session = self._find(_key(arguments, state), sizes)
        if session is None:
            with _BUILD_LOCK:
                state = self._state_now()
                session = self._find(_key(arguments, state), sizes)
                if session is None:
                    session = self._build(sizes, arguments, state, call)
                    state = self._state_now()
        if session.state is not state:
            with _BUILD_LOCK:
                session.bind(self._state_now(), self.module)
        return session

    def _find(self, key: tuple[Any, ...], sizes: tuple[int, ...]) -> _ModuleSession | None:
        with self._lock:
            for place, session in self._sessions.items():
                if session.key == key and not session.should_rebuild and session.traced.accepts(sizes):
                    self._hits += 1
                    return self._sessions.get(place)
        return None

    # Building

    def _build(self, sizes: tuple[int, ...], arguments: Arguments, state: _State, call: Any) -> _ModuleSession:
        self._misses += 1
        key = _key(arguments, state)
        known = self._errors.get((key, sizes))
        if known is not None:
            raise CaptureError(known.what, where=known.where, hint=known.hint)
        inspect.signature(self.forward).bind(*call[0], **call[1])  # raises TypeError for wrong arguments
        started = time.perf_counter()
        reason, varying = self._reason(key, sizes, arguments)
        try:
            if state.hooked:
                raise CaptureError(f"the module {state.hooked} has hooks, which a compiled module does not call")
            session = self._load_or_compile(sizes, arguments, varying, call)
        except CaptureError as error:
            # A copy: the traceback of the raised error refers to frames with tensors.
            self._errors.put((key, sizes), CaptureError(error.what, where=error.where, hint=error.hint))
            raise
        with self._lock:
            self._add(session)
            self._built += 1
            from_disk = isinstance(session.run, module_store.StoredModel)
            seconds = time.perf_counter() - started
            self.builds.append(Build(reason, session.traced.is_dynamic, from_disk, seconds))
        log.info("built a session: %s", self.builds[-1])
        return session

    def _load_or_compile(
        self, sizes: tuple[int, ...], arguments: Arguments, varying: set[int], call: Any
    ) -> _ModuleSession:
        key = _key(arguments, self._state_now())
        should_rebuild = any(session.key == key and session.should_rebuild for _, session in self._sessions.items())
        store_key = module_store.store_key(self._uncompiled_module(), self.options, arguments, sizes, varying)
        if store_key is not None and not should_rebuild and not self._rejected.get(key):
            flat = FlatModule(self.module, self.forward, call)
            loaded = module_store.load(self.options, store_key, self.module, arguments, sizes, flat)
            if loaded is not None:
                traced, stored, outputs = loaded
                self.report.graphs.append(GraphReport("module, from disk", 0, [stored.report]))
                return _ModuleSession(key, sizes, traced, stored, random=False, first=(arguments, outputs))
        traced = self._trace(call, arguments, varying)
        if traced.random and self._state_now().training:
            raise CaptureError("forward draws random numbers, as dropout does")
        with collecting() as report:
            compiled = compile_graph(traced.graph, MODULE, frozenset(traced.weights), self.options)
        self.report.graphs += report.graphs
        session = _ModuleSession(_key(arguments, self._state_now()), sizes, traced, compiled.run, traced.random)
        if store_key is not None:
            session.callback = lambda: module_store.store(self.options, store_key, self.module, traced, compiled.region)
        return session

    def _uncompiled_module(self) -> torch.nn.Module:
        """Return a shallow copy of the module with its own forward, for its fingerprint."""
        copy = self.module.__class__.__new__(self.module.__class__)
        attributes = {name: value for name, value in vars(self.module).items() if value is not self.compiled_forward}
        replaced = self._replaced_forward
        vars(copy).update(attributes if replaced is None else {**attributes, "forward": replaced})
        return copy

    def _trace(self, call: Any, arguments: Arguments, varying: set[int]) -> ModuleTrace:
        def state() -> tuple[Any, ...]:
            return self._read_state().attributes.key

        before = state()
        try:
            return self._trace_once(call, arguments, varying, state)
        except CaptureError:
            if state() == before:
                raise
        # the first call may have initialized the module lazily
        return self._trace_once(call, arguments, varying, state)

    def _trace_once(
        self, call: Any, arguments: Arguments, varying: set[int], state: Callable[[], tuple[Any, ...]]
    ) -> ModuleTrace:
        preserved = self.options.translations or ()
        if varying:
            try:
                return trace(self.module, self.forward, call, arguments, varying, state, preserved)
            except CaptureError as error:
                log.info("sizes cannot be dynamic: %s", error.what)
        return trace(self.module, self.forward, call, arguments, (), state, preserved)

    def _reason(self, key: tuple[Any, ...], sizes: tuple[int, ...], arguments: Arguments) -> tuple[str, set[int]]:
        """Return why a session is built, and which sizes are to be dynamic: those that changed before."""
        before, varying = self._size_history.get(arguments.key) or (sizes, set())
        varying = varying | {place for place, (old, size) in enumerate(zip(before, sizes, strict=True)) if old != size}
        self._size_history.put(arguments.key, (before, varying))
        reason = self._changed_attribute(key) or ("new sizes" if varying else "a new signature")
        if self.dynamic is True:
            varying = varying | set(range(sum(tensor.dim() for tensor in arguments.tensors)))
        return reason, varying if self.dynamic else set()

    def _changed_attribute(self, key: tuple[Any, ...]) -> str | None:
        """Return which attribute of the module changed since the last call with such arguments; None if none did."""
        others = (s.key[1] for _, s in self._sessions.items() if s.key[0] == key[0] and s.key[1] is not key[1])
        other = next(others, None)
        return None if other is None else f"the module changed at {first_difference(other, key[1])!r}"

    def _add(self, session: _ModuleSession) -> None:
        """Cache a session, and drop those whose calls it can serve."""
        self._remove(lambda other: other.key == session.key and session.traced.accepts(other.sizes))
        self._sessions.put(id(session), session)

    def _reject(self, session: _ModuleSession) -> None:
        """Drop a session loaded from disk, and do not load another for its key."""
        with self._lock:
            self._remove(lambda other: other is session)
            self._rejected.put(session.key, True)

    def _remove(self, is_obsolete: Callable[[_ModuleSession], bool]) -> None:
        remaining = [(place, session) for place, session in self._sessions.items() if not is_obsolete(session)]
        self._sessions.clear()
        for place, session in reversed(remaining):
            self._sessions.put(place, session)

    # Fallback

    def _raise_or_note(self, error: CaptureError, training: bool = False) -> None:
        """Raise the error, or report once that the module is not one graph; in training mode never raise."""
        if self.options.fallback == "error" and not training:
            raise error
        reason = f"{error.what}, in training mode: call eval() for inference" if training else error.what
        fallback = Fallback(f"{type(self.module).__name__}.forward", reason, error.where or "")
        if fallback not in self.report.fallbacks:
            self.report.graphs.append(GraphReport("module", 0, fallbacks=[fallback]))
            if self.options.fallback == "warn":
                log.warning("not a single graph, so torch.compile compiles it in parts: %s", fallback)

    def _run_by_dynamo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run by torch.compile: training, and modules that are not a single graph."""
        forward = self.forward
        if self._dynamo_compiled is None or self._dynamo_compiled[0] != forward:
            dynamic = None if self.dynamic == "auto" else self.dynamic
            options = Options.of(self.options, intercept=False)  # the hook was already called
            compiled = torch.compile(forward, backend=partial(backend, options=options), dynamic=dynamic, **_ISOLATED)
            self._dynamo_compiled = (forward, compiled)
        with collecting() as report:
            result = self._dynamo_compiled[1](*args, **kwargs)
        self.report.graphs += report.graphs
        return result

    # Gradients

    def _wants_grad(self, arguments: Arguments) -> bool:
        return any(t.requires_grad for t in arguments.tensors) or any(p.requires_grad for p in self.module.parameters())

    def _with_gradients(
        self, session: _ModuleSession, arguments: Arguments, state: _State, call: Any
    ) -> list[torch.Tensor]:
        """Return the session's outputs, for whose gradients torch recomputes the forward."""
        unchanged = copy_arguments(call, arguments.tensors, arguments.integers).value
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        differentiable = [i for i, tensor in enumerate(arguments.tensors) if tensor.requires_grad]
        versions = _module_versions(self.module)
        others = [tensor for tensor in arguments.tensors if not tensor.requires_grad]  # autograd checks those that do
        other_versions = _version_counters(others)
        flat = FlatModule(self.module, self.forward, unchanged)

        def forward(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
            tensors = list(arguments.tensors)
            for place, tensor in zip(differentiable, inputs, strict=False):
                tensors[place] = tensor
            named = dict(zip((f"module.{n}" for n in parameters), inputs[len(differentiable) :], strict=True))
            results: Sequence[Any] = torch.func.functional_call(flat, named, tuple(tensors))
            return results

        def recompute_error() -> str | None:
            changed = not state.attributes.unchanged() or _module_versions(self.module) != versions
            if changed:
                return "the module was changed since"
            return "an argument was edited in place since" if _version_counters(others) != other_versions else None

        inputs = [*(arguments.tensors[i] for i in differentiable), *parameters.values()]
        return Recompute(forward, recompute_error).attach(session.outputs(arguments), inputs)

    # State of the cache

    def info(self) -> CacheInfo:
        """Return the statistics of the cache."""
        with self._lock:
            size = len(self._sessions)
            return CacheInfo(self._hits, self._misses, size, self.options.cache_size, self._built)

    def release(self) -> None:
        """Drop every session."""
        with _BUILD_LOCK, self._lock:
            self._sessions.clear()
            self._dynamo_compiled = self._state = None
        gc.collect()  # graphs are reference cycles

    def forget(self) -> None:
        """Drop every session, and the recorded sizes and errors."""
        self.release()
        with _BUILD_LOCK, self._lock:
            self._size_history.clear()
            self._errors.clear()
            self._rejected.clear()
            self._hits = self._misses = self._built = 0
            self.builds.clear()
            self.report = Report()


def _hooks(module: torch.nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_traceable_hook(hook: Any) -> bool:
    """Whether the traced graph contains the effect of a hook: transformers collects results by hooks."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "transformers"


def _module_versions(module: torch.nn.Module) -> list[int]:
    """Return the version counters of all parameters and buffers."""
    return _version_counters((*module.parameters(), *module.buffers()))


def _version_counters(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _key(arguments: Arguments, state: _State) -> tuple[Any, ...]:
    """Return the key of a session: all that it depends on except sizes."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return arguments.key, state.attributes.key, tuple(autocast), torch.get_default_dtype(), torch.get_default_device()
