"""The sessions of a compiled module: which fits a call, when to build another, and what cannot be built."""

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
from sardonyx.capture.arguments import Arguments, Call, copy_of
from sardonyx.capture.attributes import Attributes, Mask, first_difference
from sardonyx.capture.calls import Flat, Traced, tensor_of, trace
from sardonyx.doors import kept
from sardonyx.doors.dynamo import sardonyx as backend
from sardonyx.errors import CaptureError
from sardonyx.options import Options
from sardonyx.pipeline import compile_graph
from sardonyx.run.recompute import Recompute
from sardonyx.telemetry.intercept import show_call
from sardonyx.telemetry.report import Fallback, GraphReport, Report, collecting

log = logging.getLogger(__name__)

_REMEMBERED = 256
"""Signatures whose sizes, or refusal, are remembered."""
_ALONE: dict[str, Any] = {
    name: True for name in ("isolate_recompiles",) if name in inspect.signature(torch.compile).parameters
}
"""Where torch can, it counts a module's recompilations apart: else by code, which all modules of a class share."""

Dynamic: TypeAlias = Literal["auto"] | bool


class CacheInfo(NamedTuple):
    """How often a session was there, how many there are, and how many were ever built."""

    hits: int
    misses: int
    size: int
    maxsize: int
    built: int


class Build(NamedTuple):
    """One session that was built: why, for which sizes, and how long that took."""

    reason: str
    dynamic: bool
    from_disk: bool
    seconds: float


@dataclass
class _State:
    """The module as it was when last looked at."""

    attributes: Attributes
    training: bool
    hooked: str | None
    """A module inside that has hooks of its own, if any."""


@dataclass(eq=False)
class _Session:
    key: tuple[Any, ...]
    sizes: tuple[int, ...]
    traced: Traced
    run: Callable[[list[Any]], Sequence[Any]]
    random: bool
    state: _State | None = None
    bound: list[Any] = field(default_factory=list)
    """The arguments of the graph, with the weights of `state` in their places."""
    first: tuple[Arguments, list[torch.Tensor]] | None = None
    """A call whose outputs are known already."""
    then: Callable[[], None] | None = None
    """What is left to do after the first call."""

    @property
    def worn(self) -> bool:
        """Whether another session should take its place."""
        return isinstance(self.run, kept.Restored) and self.run.worn

    def bind(self, state: _State, module: torch.nn.Module) -> None:
        """Take the weights that the module has now."""
        count = len(self.traced.held) + len(self.traced.given)
        bound: list[Any] = [None] * count
        for index, held in self.traced.held.items():
            bound[index] = tensor_of(module, held) if isinstance(held, str) else held
        self.bound, self.state = bound, state

    def outputs(self, arguments: Arguments) -> list[torch.Tensor]:
        """Run the graph for a call."""
        first, self.first = self.first, None
        if first is not None and first[0] is arguments:
            return first[1]
        flat: list[Any] = [*arguments.dense(), *(arguments.integers[i] for i in self.traced.dynamic)]
        args = list(self.bound)
        for index, place in self.traced.given.items():
            args[index] = flat[place]
        with torch.no_grad():
            outputs = list(self.run(args))
        then, self.then = self.then, None
        if then is not None:
            then()
        return outputs


class _Turn:
    """One thread at a time builds: torch.export changes things that all threads see, of modules and of torch."""

    def __init__(self) -> None:
        self.forked()
        fork.register(self)

    def forked(self) -> None:
        """In a child process: nobody builds."""
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

    def is_anothers(self) -> bool:
        """Whether another thread builds."""
        return self._owner not in (0, threading.get_ident())


_TURN = _Turn()


def _is_traced() -> bool:
    """Whether this thread is tracing something; where another one is, wait until it has done so."""
    while torch.compiler.is_compiling():
        if not _TURN.is_anothers():
            return torch.compiler.is_compiling()
        with _TURN:
            pass
    return False


class Signatures:
    """Calls a module through sessions, at most `cache_size` of them, the least recently used dropped first."""

    def __init__(self, module: torch.nn.Module, options: Options, dynamic: Dynamic) -> None:
        self.module, self.options, self.dynamic = module, options, dynamic
        self.report = Report()
        self.builds: list[Build] = []
        self.bridge: Callable[..., Any] | None = None
        self._displaced: Any = None
        self._sessions = LRU[_Session](options.cache_size)
        self._seen: LRU[tuple[tuple[int, ...], set[int]]] = LRU(_REMEMBERED)
        self._refused: LRU[CaptureError] = LRU(_REMEMBERED)
        self._distrusted: LRU[bool] = LRU(_REMEMBERED)
        self._state: _State | None = None
        self._hits = self._misses = self._built = 0
        self._lock = fork.Lock()
        self._by_dynamo: tuple[Any, Callable[..., Any]] | None = None

    # A call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module."""
        if torch.compiler.is_dynamo_compiling() or _is_traced():  # what is around the module may see what is in it
            return self.forward(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CaptureError(
                "a compiled module is called inside a transform of torch.func, as vmap or grad",
                hint="transform the module itself, which is .original",
            )
        if self.options.intercept:
            show_call(self.module, args, kwargs, self.options.intercept)
        return self._called(args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._arguments_and_session((args, kwargs))
        if found is None:
            return self._through_dynamo(args, kwargs)
        arguments, state, session = found
        wants_grad = torch.is_grad_enabled() and self._wants_grad(arguments)
        if wants_grad and session.random:  # its forward cannot be computed again
            return self._through_dynamo(args, kwargs)
        try:
            outputs = (
                self._with_gradients(session, arguments, state, (args, kwargs))
                if wants_grad
                else session.outputs(arguments)
            )
        except kept.Stale:
            self._drop(session)
            return self._called(args, kwargs)
        numbers = session.traced.numbers(arguments.sizes())
        return session.traced.results.put_together(Call(outputs, arguments, numbers))

    def _arguments_and_session(self, given: Any) -> tuple[Arguments, _State, _Session] | None:
        """What a call needs; None if it has to go through torch.compile."""
        training = False
        try:
            arguments = Arguments.of(given)
            state = self._state_now()
            training = state.training
            if training and torch.is_grad_enabled() and self._wants_grad(arguments):
                return None
            return arguments, state, self._session(arguments, state, given)
        except CaptureError as error:
            self._allow(error, training)
            return None

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward, whatever is put in its place for a while."""
        own = vars(self.module).get("forward")
        own = self._displaced if own is self.bridge else own
        bound: Callable[..., Any] = own or type(self.module).forward.__get__(self.module)
        return bound

    def displace(self) -> None:
        """Put the compiled forward in the place of the module's own."""
        self._displaced = vars(self.module).get("forward")
        vars(self.module)["forward"] = self.bridge

    def restore(self) -> None:
        """Give the module its own forward back, unless someone gave it another meanwhile."""
        if vars(self.module).get("forward") is self.bridge:
            del vars(self.module)["forward"]
            if self._displaced is not None:
                vars(self.module)["forward"] = self._displaced
        self._displaced = None

    def _state_now(self) -> _State:
        state = self._state
        if state is None or not state.attributes.unchanged():
            with _TURN:  # tracing puts other tensors in the place of weights for a while
                state = self._state = self._look()
        return state

    def _look(self) -> _State:
        attributes = Attributes(self.module, Mask(self.module, "forward", self.bridge, lambda: self._displaced))
        for key in self._known_states():
            if key == attributes.key:
                attributes.key = key  # the same object, which is compared in no time
        inside = list(self.module.named_modules())
        hooked = (name for name, m in inside if name and not all(map(_is_harmless, _hooks(m))))
        return _State(attributes, any(m.training for _, m in inside), next(hooked, None))

    def _known_states(self) -> list[Any]:
        with self._lock:
            return [session.key[1] for _, session in self._sessions.items()]

    def _session(self, arguments: Arguments, state: _State, given: Any) -> _Session:
        sizes = arguments.sizes()
        found = self._find(_key(arguments, state), sizes)
        if found is None:
            with _TURN:
                state = self._state_now()
                found = self._find(_key(arguments, state), sizes)
                if found is None:
                    found = self._build(sizes, arguments, state, given)
                    state = self._state_now()
        if found.state is not state:
            with _TURN:
                found.bind(self._state_now(), self.module)
        return found

    def _find(self, key: tuple[Any, ...], sizes: tuple[int, ...]) -> _Session | None:
        with self._lock:
            for place, session in self._sessions.items():
                if session.key == key and not session.worn and session.traced.accepts(sizes):
                    self._hits += 1
                    return self._sessions.get(place)
        return None

    # Building

    def _build(self, sizes: tuple[int, ...], arguments: Arguments, state: _State, given: Any) -> _Session:
        self._misses += 1
        key = _key(arguments, state)
        known = self._refused.get((key, sizes))
        if known is not None:
            raise CaptureError(known.what, where=known.where, hint=known.hint)
        inspect.signature(self.forward).bind(*given[0], **given[1])  # what is simply wrong is the caller's error
        started = time.perf_counter()
        reason, varying = self._reason(key, sizes, arguments)
        try:
            if state.hooked:
                raise CaptureError(f"the module {state.hooked} has hooks, which a compiled module would not call")
            session = self._make(sizes, arguments, varying, given)
        except CaptureError as error:
            # A new one: that which is raised knows the frames it came through, and they the tensors.
            self._refused.put((key, sizes), CaptureError(error.what, where=error.where, hint=error.hint))
            raise
        with self._lock:
            self._keep(session)
            self._built += 1
            from_disk = isinstance(session.run, kept.Restored)
            seconds = time.perf_counter() - started
            self.builds.append(Build(reason, session.traced.is_dynamic, from_disk, seconds))
        log.info("built a session: %s", self.builds[-1])
        return session

    def _make(self, sizes: tuple[int, ...], arguments: Arguments, varying: set[int], given: Any) -> _Session:
        key = _key(arguments, self._state_now())
        worn = any(session.key == key and session.worn for _, session in self._sessions.items())
        at = kept.key(self._bare(), self.options, arguments, sizes, varying)
        if at is not None and not worn and not self._distrusted.get(key):
            flat = Flat(self.module, self.forward, given)
            found = kept.find(self.options, at, self.module, arguments, sizes, flat)
            if found is not None:
                traced, restored, outputs = found
                self.report.graphs.append(GraphReport("module, from disk", 0, [restored.report]))
                return _Session(key, sizes, traced, restored, random=False, first=(arguments, outputs))
        traced = self._trace(given, arguments, varying)
        if traced.random and self._state_now().training:
            raise CaptureError("forward draws random numbers, as dropout does")
        with collecting() as report:
            compiled = compile_graph(traced.graph, "module", frozenset(traced.held), self.options)
        self.report.graphs += report.graphs
        session = _Session(_key(arguments, self._state_now()), sizes, traced, compiled.run, traced.random)
        if at is not None:
            session.then = lambda: kept.keep(self.options, at, self.module, traced, compiled.region)
        return session

    def _bare(self) -> torch.nn.Module:
        """The module with a forward of its own: a fingerprint is of what is computed, not of how it is called here."""
        bare = self.module.__class__.__new__(self.module.__class__)
        held = {name: value for name, value in vars(self.module).items() if value is not self.bridge}
        vars(bare).update(held if self._displaced is None else {**held, "forward": self._displaced})
        return bare

    def _trace(self, given: Any, arguments: Arguments, varying: set[int]) -> Traced:
        def state() -> tuple[Any, ...]:
            return self._look().attributes.key

        before = state()
        try:
            return self._trace_once(given, arguments, varying, state)
        except CaptureError:
            if state() == before:
                raise
        return self._trace_once(given, arguments, varying, state)  # what was prepared by the first call is there now

    def _trace_once(
        self, given: Any, arguments: Arguments, varying: set[int], state: Callable[[], tuple[Any, ...]]
    ) -> Traced:
        whole = self.options.translations or ()
        if varying:
            try:
                return trace(self.module, self.forward, given, arguments, varying, state, whole)
            except CaptureError as error:
                log.info("sizes cannot be dynamic: %s", error.what)
        return trace(self.module, self.forward, given, arguments, (), state, whole)

    def _reason(self, key: tuple[Any, ...], sizes: tuple[int, ...], arguments: Arguments) -> tuple[str, set[int]]:
        """Why a session is built, and which sizes are to be dynamic: those that were different before."""
        before, varying = self._seen.get(arguments.key) or (sizes, set())
        varying = varying | {place for place, (old, size) in enumerate(zip(before, sizes, strict=True)) if old != size}
        self._seen.put(arguments.key, (before, varying))
        reason = self._change(key) or ("new sizes" if varying else "a new signature")
        if self.dynamic is True:
            varying = varying | set(range(sum(tensor.dim() for tensor in arguments.tensors)))
        return reason, varying if self.dynamic else set()

    def _change(self, key: tuple[Any, ...]) -> str | None:
        """What changed in the module since it was last called with such arguments, if that is it."""
        others = (s.key[1] for _, s in self._sessions.items() if s.key[0] == key[0] and s.key[1] is not key[1])
        other = next(others, None)
        return None if other is None else f"the module changed at {first_difference(other, key[1])!r}"

    def _keep(self, session: _Session) -> None:
        """Keep a session in place of those whose calls it can serve."""
        self._remove(lambda other: other.key == session.key and session.traced.accepts(other.sizes))
        self._sessions.put(id(session), session)

    def _drop(self, session: _Session) -> None:
        """Forget a session from disk, and look there no more for what it was for."""
        with self._lock:
            self._remove(lambda other: other is session)
            self._distrusted.put(session.key, True)

    def _remove(self, is_out: Callable[[_Session], bool]) -> None:
        stay = [(place, session) for place, session in self._sessions.items() if not is_out(session)]
        self._sessions.clear()
        for place, session in reversed(stay):
            self._sessions.put(place, session)

    # What sessions cannot do

    def _allow(self, error: CaptureError, training: bool = False) -> None:
        """Raise, or tell once that the module is not compiled as one graph; in training mode that is no error."""
        if self.options.fallback == "error" and not training:
            raise error
        reason = f"{error.what}, in training mode: eval() is for inference" if training else error.what
        fallback = Fallback(f"{type(self.module).__name__}.forward", reason, error.where or "")
        if fallback not in self.report.fallbacks:
            self.report.graphs.append(GraphReport("module", 0, fallbacks=[fallback]))
            if self.options.fallback == "warn":
                log.warning("no single graph, so torch.compile takes it in parts: %s", fallback)

    def _through_dynamo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By torch.compile: training, and what is no single graph."""
        forward = self.forward
        if self._by_dynamo is None or self._by_dynamo[0] != forward:
            dynamic = None if self.dynamic == "auto" else self.dynamic
            options = Options.of(self.options, intercept=False)  # the call has been shown
            compiled = torch.compile(forward, backend=partial(backend, options=options), dynamic=dynamic, **_ALONE)
            self._by_dynamo = (forward, compiled)
        with collecting() as report:
            result = self._by_dynamo[1](*args, **kwargs)
        self.report.graphs += report.graphs
        return result

    # Gradients

    def _wants_grad(self, arguments: Arguments) -> bool:
        return any(t.requires_grad for t in arguments.tensors) or any(p.requires_grad for p in self.module.parameters())

    def _with_gradients(self, session: _Session, arguments: Arguments, state: _State, given: Any) -> list[torch.Tensor]:
        """The session's outputs, whose gradients torch computes if it is asked to."""
        unchanged = copy_of(given, arguments.tensors, arguments.integers).value
        parameters = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        givers = [i for i, tensor in enumerate(arguments.tensors) if tensor.requires_grad]
        versions = _versions(self.module)
        others = [tensor for tensor in arguments.tensors if not tensor.requires_grad]  # autograd looks at those that do
        edits = _edits(others)
        flat = Flat(self.module, self.forward, unchanged)

        def again(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
            tensors = list(arguments.tensors)
            for place, tensor in zip(givers, inputs, strict=False):
                tensors[place] = tensor
            named = dict(zip((f"module.{n}" for n in parameters), inputs[len(givers) :], strict=True))
            results: Sequence[Any] = torch.func.functional_call(flat, named, tuple(tensors))
            return results

        def hindrance() -> str | None:
            changed = not state.attributes.unchanged() or _versions(self.module) != versions
            if changed:
                return "the module was changed since"
            return "an argument was edited in place since" if _edits(others) != edits else None

        inputs = [*(arguments.tensors[i] for i in givers), *parameters.values()]
        return Recompute(again, hindrance).attach(session.outputs(arguments), inputs)

    # What is kept

    def info(self) -> CacheInfo:
        """How sessions were used."""
        with self._lock:
            size = len(self._sessions)
            return CacheInfo(self._hits, self._misses, size, self.options.cache_size, self._built)

    def release(self) -> None:
        """Drop every session."""
        with _TURN, self._lock:
            self._sessions.clear()
            self._by_dynamo = self._state = None
        gc.collect()  # graphs refer to themselves

    def forget(self) -> None:
        """Drop every session, and what was learnt of sizes and refusals."""
        self.release()
        with _TURN, self._lock:
            self._seen.clear()
            self._refused.clear()
            self._distrusted.clear()
            self._hits = self._misses = self._built = 0
            self.builds.clear()
            self.report = Report()


def _hooks(module: torch.nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def _is_harmless(hook: Any) -> bool:
    """Whether a hook does nothing but what a graph of the call has in it: transformers gather results by hooks."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "transformers"


def _versions(module: torch.nn.Module) -> list[int]:
    """Torch's counters of edits in place of everything the module holds."""
    return _edits((*module.parameters(), *module.buffers()))


def _edits(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _key(arguments: Arguments, state: _State) -> tuple[Any, ...]:
    """What a session is for, beside sizes."""
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return arguments.key, state.attributes.key, tuple(autocast), torch.get_default_dtype(), torch.get_default_device()
