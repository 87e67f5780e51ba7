"""`profile`: measure the time of a call by module, source line and operator, and outside kernels."""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from sardonyx import dtypes, fork
from sardonyx.diagnose.explain import unchanged
from sardonyx.diagnose.profiling.result import Measurement, Profile, profile_of
from sardonyx.diagnose.profiling.session import ProfiledRunner, events_of, profiling_options
from sardonyx.errors import EngineError, OptionError
from sardonyx.model_files import load_model
from sardonyx.options import Options
from sardonyx.telemetry.graph_snapshot import GraphSnapshot
from sardonyx.telemetry.report import observing

_WARM_UPS = 2


def profile(
    model: Any,
    *args: Any,
    calls: int = 10,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    trace: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Profile:
    """Call a model `calls` times without gradients, and return where the time goes.

    A module or a function is compiled as by `torch.compile(model, backend="sardonyx")`. A compiled model, by that or by
    `sardonyx.compile`, is compiled again with the same options, and is not changed. A `Program`, an ONNX file or model,
    and a `NativeModel` run as they are; these take arrays or tensors in order, or by name.

    `trace` is a file for onnxruntime's events, in the format of chrome://tracing.

    >>> found = profile(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.GELU()).eval(), torch.ones(3, 4), calls=2)
    >>> sorted(row.name for row in found.operators), sorted(found.tree.children)
    (['Gelu', 'Gemm'], ['0', '1'])
    """
    if calls < 1:
        raise OptionError(f"calls is {calls!r}", hint="use an integer of at least 1")
    with torch.no_grad(), unchanged(model):
        measurement = _measure(model, args, kwargs, calls, options, dynamic)
    result = profile_of(measurement)
    if trace is not None:
        result.save_trace(trace)
    return result


# What to call


def _measure(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], calls: int, options: Any, dynamic: bool | None
) -> Measurement:
    from sardonyx.doors.module import CompiledModule
    from sardonyx.doors.program import Program
    from sardonyx.native.model import NativeModel

    if isinstance(model, (str, os.PathLike, onnx.ModelProto, ir.Model, NativeModel)):
        _reject_options(options)
        return _measure_session(model, _session_feeds(args, kwargs), calls)
    if isinstance(model, Program):
        _reject_options(options)
        return _measure_calls(_fresh_program(model), args, kwargs, calls)
    if isinstance(model, CompiledModule):
        core = model._core
        chosen = Options.of(core.options if options is None else options, cache_dir="", intercept=False)
        return _measure_calls(CompiledModule(model.original, chosen, core.dynamic), args, kwargs, calls)
    original, own = _unwrap(model)
    return _measure_calls(_compiled(original, own if options is None else options, dynamic), args, kwargs, calls)


def _reject_options(options: Any) -> None:
    if options is not None:
        raise OptionError("options are given for a model that is already compiled", hint="leave them out")


def _fresh_program(program: Any) -> Any:
    """Return a copy of a program with its own session."""
    fresh = copy.copy(program)
    fresh._runners, fresh._lock = {}, fork.Lock()
    return fresh


def _unwrap(model: Any) -> tuple[Any, Any]:
    """Return the model that torch.compile wraps, and the options of our backend; other models as they are."""
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        return model._orig_mod, _options_of(model.dynamo_ctx.callback)
    original = getattr(model, "_torchdynamo_orig_callable", None)
    if original is None:
        return model, None
    return original, _options_of(inspect.getclosurevars(model).nonlocals.get("callback"))


def _options_of(callback: Any) -> Any:
    from torch._dynamo.eval_frame import innermost_backend

    backend = innermost_backend(callback)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    if name not in ("sardonyx", "onnxrt"):
        raise OptionError(
            f"the model is compiled by the backend {name!r}",
            hint="pass the original model, or one compiled by the backend 'sardonyx'",
        )
    from sardonyx.doors.dynamo import convert_legacy_options

    return convert_legacy_options(getattr(backend, "kwargs", {}).get("options"))


def _compiled(model: Callable[..., Any], options: Any, dynamic: bool | None) -> Callable[..., Any]:
    from sardonyx.doors.dynamo import sardonyx as backend

    chosen = Options.of(options)

    def fresh(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return backend(graph, inputs, options=chosen)

    compiled: Callable[..., Any] = torch.compile(model, backend=fresh, dynamic=dynamic)
    return compiled


def _measure_calls(call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], calls: int) -> Measurement:
    """Measure calls without a profiler, then with one."""
    sessions: list[ProfiledRunner] = []

    def observe(job: Any, runner: Any) -> ProfiledRunner:
        sessions.append(ProfiledRunner(job, runner))
        return sessions[-1]

    try:
        with observing(observe):
            plain, _ = _time_calls(call, args, kwargs, calls, sessions)
            for session in sessions:
                session.is_profiled = True
            profiled, inside = _time_calls(call, args, kwargs, calls, sessions)
        used = [session for session in sessions if session.seconds]
        results = [(session, session.finish(calls)) for session in used]
    finally:
        for session in sessions:
            session.close()
    others = {session.engine for session, events in results if events is None}
    remarks = [f"the engine {name!r} does not report the times of nodes" for name in sorted(others)]
    remarks += [] if results else ["nothing was compiled: everything ran in torch"]
    remarks += _device_remarks(used)
    events = [events for _, events in results if events is not None]
    weights = sum(session.snapshot.weights for session in used)
    return Measurement(events, weights, median(plain), mean(profiled), mean(inside), remarks)


def _device_remarks(sessions: Iterable[ProfiledRunner]) -> list[str]:
    devices = {session.job.device.type for session in sessions} - {"cpu"}
    return [f"on {name}, times of kernels are those of launching them" for name in sorted(devices)]


def _time_calls(
    call: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    calls: int,
    sessions: Sequence[ProfiledRunner],
) -> tuple[list[float], list[float]]:
    """Return the seconds of each call, and those spent in sessions, after a few warm-up calls."""
    total, inside = [], []
    for number in range(_WARM_UPS + calls):
        for session in sessions:
            session.seconds.clear()
            if number == _WARM_UPS:
                session.begin()
        started = time.perf_counter()
        call(*args, **kwargs)
        _wait(sessions)
        if number >= _WARM_UPS:
            total.append(time.perf_counter() - started)
            inside.append(sum(sum(session.seconds) for session in sessions))
    return total, inside


def _wait(sessions: Iterable[ProfiledRunner]) -> None:
    if any(session.job.device.type == "cuda" for session in sessions):
        torch.cuda.synchronize()


# An ONNX model


def _session_feeds(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Return a function that gives a session's inputs by name."""

    def feeds(session: Any) -> dict[str, Any]:
        names = [x.name for x in session.get_inputs()]
        if len(args) > len(names):
            raise OptionError(f"{len(args)} inputs are given, but the model takes {len(names)}: {', '.join(names)}")
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in names if name not in values]
        if missing or set(values) - set(names):
            unknown = sorted(set(values) - set(names))
            problem = f"the call lacks the inputs {missing}" if missing else f"the model has no inputs {unknown}"
            raise OptionError(problem, hint=f"the model takes {', '.join(names)}")
        return {name: _array(value) for name, value in values.items()}

    return feeds


def _array(value: Any) -> np.ndarray[Any, Any]:
    return dtypes.to_array(value.detach().cpu()) if isinstance(value, torch.Tensor) else np.asarray(value)


def _measure_session(model: Any, fed: Callable[[Any], dict[str, Any]], calls: int) -> Measurement:
    loaded, library, path = _load(model)
    snapshot = GraphSnapshot.of(loaded)
    with tempfile.TemporaryDirectory(prefix="sardonyx-profile-") as folder:
        plain = _session_call(_session(loaded, library, path, {}), fed)
        seconds, _ = _time_calls(plain, (), {}, calls, ())
        session = _session(loaded, library, path, profiling_options(None, Path(folder), snapshot.weights))
        profiled, _ = _time_calls(_session_call(session, fed), (), {}, calls, ())
        events = events_of(session, Path(folder), snapshot, skip=_WARM_UPS, calls=calls)
    return Measurement([events], snapshot.weights, median(seconds), mean(profiled), mean(profiled))


def _load(model: Any) -> tuple[ir.Model, Path | None, Path | None]:
    """Return the model, the library of its kernels, and its path, which onnxruntime needs to find external weights."""
    from sardonyx.native.model import NativeModel

    if isinstance(model, NativeModel):
        return model.model, model.library, None
    path = Path(model) if isinstance(model, (str, os.PathLike)) else None
    return load_model(model), None, path


def _session(model: ir.Model, library: Path | None, path: Path | None, settings: Mapping[str, Any]) -> Any:
    from sardonyx.native.session import onnxruntime, open_session

    options = onnxruntime().SessionOptions()
    options.log_severity_level = 4  # its messages are in the exception too
    options.intra_op_num_threads = torch.get_num_threads()
    for name, value in settings.items():
        setattr(options, name, value)
    if path is None:
        return open_session(model, library, options)
    try:
        return onnxruntime().InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise EngineError(f"onnxruntime refused {path}: {error}") from error


def _session_call(session: Any, fed: Callable[[Any], dict[str, Any]]) -> Callable[[], Any]:
    feeds = fed(session)

    def call() -> Any:
        return session.run(None, feeds)

    return call
