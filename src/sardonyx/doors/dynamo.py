"""The backend `sardonyx` of torch.compile, and its old name `onnxrt`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sardonyx.capture import aot
from sardonyx.errors import OptionError
from sardonyx.options import Options, Provider, check_providers
from sardonyx.pipeline import compile_graph
from sardonyx.run import sessions
from sardonyx.run.autograd import CapturedGraph, with_full_autograd
from sardonyx.telemetry import report_page
from sardonyx.telemetry.intercept import show_graph_calls
from sardonyx.telemetry.repro import write_repro_on_error

log = logging.getLogger(__name__)

_MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"cuda_graphs": False},
}
"""The options that torch's modes stand for."""


def sardonyx(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph for `torch.compile(backend="sardonyx")`; a mode stands for options, which override it."""
    if mode is not None and mode not in _MODES:
        raise OptionError(f"mode is {mode!r}", hint="use one of " + ", ".join(map(repr, _MODES)))
    return _compile(graph, inputs, _options_of(options, mode))


def _options_of(options: Options | Mapping[str, Any] | None, mode: str | None) -> Options:
    if isinstance(options, Options):
        return options
    return Options.of({**_MODES[mode or "default"], **(options or {})})


def onnxrt(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Any = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph for `backend="onnxrt"`, the former name in torch, whose options are accepted too."""
    return sardonyx(graph, inputs, options=convert_legacy_options(options), mode=mode)


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    trained: list[torch.fx.GraphModule] = []

    def compile_one(fx: torch.fx.GraphModule, example: Sequence[Any], kind: str, weights: frozenset[int]) -> Any:
        if kind == "forward":
            trained.append(fx)
        return compile_graph(fx, kind, weights, options).run

    with write_repro_on_error(options, graph, lambda: inputs, door="dynamo", kind="captured"):
        run = aot.lower(graph, inputs, compile_one, frozenset(options.translations or ()))
    if trained:
        run = with_full_autograd(run, CapturedGraph.of(graph, trained[0], options.fallback))
    return show_graph_calls(run, graph, options.intercept) if options.intercept else run


def reset() -> None:
    """Called by `torch._dynamo.reset()`."""
    sessions.clear()
    report_page.reset()


sardonyx.reset = reset  # type: ignore[attr-defined]  # dynamo's convention
onnxrt.reset = reset  # type: ignore[attr-defined]  # as above

_RENAMED = {
    "ort_session_options": "session_options",
    "pre_ort_model_transforms": "transforms",
    "preallocate_output": "preallocate_outputs",
}
_PROVIDER_LISTS = ("preferred_execution_providers", "default_execution_providers")
_PROVIDER_OPTIONS = (*_PROVIDER_LISTS, "infer_execution_providers")


def convert_legacy_options(options: Any) -> Options | dict[str, Any]:
    """Convert options of torch's `onnxrt` backend to ours; our own options pass unchanged."""
    if isinstance(options, Options):
        return options
    old = dict(options) if isinstance(options, Mapping) else dict(vars(options)) if options is not None else {}
    converted = {_RENAMED.get(key, key): value for key, value in old.items() if key not in _PROVIDER_OPTIONS}
    if converted.pop("use_aot_autograd", True) is False:
        log.info("use_aot_autograd=False has no effect: graphs always come from AOTAutograd")
    converted.pop("export_options", None)
    providers = [provider for name in _PROVIDER_LISTS for provider in check_providers(name, old.get(name)) or ()]
    if providers:
        converted["providers"] = _first_of_each_name(providers)
    if converted.get("transforms") is None:
        converted.pop("transforms", None)
    return converted


def _first_of_each_name(providers: Sequence[Provider]) -> list[Provider]:
    """Return the providers without duplicate names; their settings need not be hashable."""
    named: dict[str, Provider] = {}
    for provider in providers:
        named.setdefault(provider if isinstance(provider, str) else provider[0], provider)
    return list(named.values())
