"""APIs of older packages, implemented by this one: programs written for them only need other imports.

`docs/compat.md` describes every argument.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import torch
from torch.utils._python_dispatch import _disable_current_modes

from sardonyx.compat.torch_onnx import onnx_export, register_custom_op_symbolic, unregister_custom_op_symbolic
from sardonyx.doors import dynamo
from sardonyx.doors.export import export
from sardonyx.doors.program import Program
from sardonyx.errors import OptionError
from sardonyx.options import NUMBER, Options, check_keywords, defaults
from sardonyx.telemetry import dump
from sardonyx.telemetry.intercept import intercept, show_graph_calls

__all__ = [
    "ONNXMLIRTorch",
    "OptimizationOptions",
    "OxsDispatcher",
    "compile",
    "create_input_names",
    "dump_onnx",
    "interceptForward",
    "make_aot_ort",
    "onnx_export",
    "onnxmlir_backend",
    "register_custom_op_symbolic",
    "to_onnx",
    "train_loop",
    "unregister_custom_op_symbolic",
]

log = logging.getLogger(__name__)

Patterns: TypeAlias = str | Sequence[str] | None
Backend: TypeAlias = Callable[..., Callable[..., Any]]

_MICROSOFT = "onnxruntime"
_PATTERN_SETS = ("default", _MICROSOFT, "experimental", "ml")
"""Pattern sets of the older package; here there is one set of rules."""

_WITHOUT_EFFECT = {
    "aot_autograd": "graphs always come from AOTAutograd",
    "rewrite_more": "all rules run until none applies",
    "processor": "the provider follows the tensors' device",
    "order_algorithm": "nodes keep the order of the graph",
    "order": "nodes keep the order of the graph",
    "remove_unused": "unused nodes are always removed",
    "constant_size": "small values are folded, and the engine folds the large ones",
    "constant_fusing": "equal constants are always merged",
    "max_iter": "rules run until none applies",
    "recursive": "rules always apply to subgraphs too",
    "verifies": "the option is called verify",
    "large_model": "weights stay in torch's memory until they are written",
    "external_threshold": "a file holds its weights up to 2 GB",
    "inline": "there are no local functions to inline",
    "raise_list": "torch.export decides",
    "api_two": "there is one way to export",
}
"""Arguments that are accepted and ignored, and why."""


def make_aot_ort(
    dynamic: bool = False,
    rewrite: bool | str = "try",
    *,
    verbose: int = 0,
    enable_pattern: Patterns = "default",
    disable_pattern: Patterns = None,
    ort_optimization_level: str | None = None,
    dump_prefix: str | None = None,
    **more: Any,
) -> tuple[Backend, dict[str, Any]]:
    """Return a backend for `torch.compile`, and its options; other options of this package are accepted too.

    `rewrite=False` applies no rules; the patterns select rules. `dynamic` has no effect: dynamo decides which sizes are
    symbolic, by `torch.compile(dynamic=...)`.

    >>> make_aot_ort(dynamic=True, disable_pattern=["Silu"])[1]
    {'optimize': 'default-Silu'}
    """
    chosen = _drop_without_effect(more)
    if not rewrite or (enable_pattern, disable_pattern) != ("default", None):
        chosen["optimize"] = _rules(enable_pattern, disable_pattern) if rewrite else "none"
    if ort_optimization_level is not None:
        chosen["session_options"] = {"graph_optimization_level": _level(ort_optimization_level)}
    if dump_prefix is not None:
        chosen["dump"] = f"{dump_prefix}_{NUMBER}"
    check_keywords(chosen, make_aot_ort)
    Options.of(chosen)  # raise for a wrong option here, not at the first call
    _show_logs(verbose)

    def backend(
        graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
    ) -> Callable[..., Any]:
        return dynamo.sardonyx(graph, inputs, options={**chosen, **(options or {})}, mode=mode)

    backend.reset = dynamo.reset  # type: ignore[attr-defined]  # dynamo's convention
    return backend, chosen


def train_loop(
    model: Any,
    *args: Any,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run one training step with ones as the target; return the gradients, which stay on the parameters too.

    By default the loss is the mean squared error and the optimizer SGD. Of several results the first is used.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    results = model(*args)
    result = results if isinstance(results, torch.Tensor) else results[0]
    loss: Any = (loss_fn or torch.nn.functional.mse_loss)(result, torch.ones_like(result))
    loss.backward()
    optimizer.step()
    return tuple(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


@contextmanager
def dump_onnx(prefix: str, folder: str | PathLike[str] | None = None, clean: bool = False) -> Iterator[None]:
    """While active, models that are compiled are dumped to `folder/prefix_0.onnx`, and so on, with their FX graphs.

    `clean` first removes files with such names, and no others. Models are compiled at their first call: a model that
    was called before is not dumped.
    """
    destination = str(Path(folder or ".") / f"{prefix}_{NUMBER}")
    Path(destination).parent.mkdir(parents=True, exist_ok=True)
    if clean:
        dump.clear(destination)
    with defaults(dump=destination):
        yield


class OptimizationOptions:
    """Which rewrite rules an export applies, by the older package's arguments; `optimize` is our option.

    >>> OptimizationOptions(patterns="default+onnxruntime", constant_folding=False).optimize
    'default-FoldConstant'
    """

    def __init__(
        self,
        *,
        patterns: Patterns = "default",
        constant_folding: bool = True,
        remove_identity: bool = True,
        verbose: int = 0,
        **more: Any,
    ) -> None:
        rules = {"FoldConstant": constant_folding, "DropIdentity": remove_identity}
        self.optimize = _rules(patterns, [name for name, enabled in rules.items() if not enabled])
        self.domains = ("com.microsoft",) if _MICROSOFT in _terms(patterns) else ()
        self.verbose = verbose
        Options.of(_drop_without_effect(more), optimize=self.optimize)


class OxsDispatcher:
    """A dispatcher for `to_onnx` without effect: torchlib always translates what our table does not."""


def create_input_names(graph_module: torch.fx.GraphModule, args: Sequence[Any]) -> list[str]:
    """Return the names of a graph's inputs, for the `input_names` of `to_onnx`."""
    names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    if len(names) != len(args):
        raise OptionError(f"the graph has {len(names)} inputs, but there are {len(args)} arguments")
    return names


def to_onnx(
    mod: torch.nn.Module | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    input_names: Sequence[str] | None = None,
    target_opset: int | Mapping[str, int] | None = None,
    *,
    options: OptimizationOptions | None = None,
    verbose: int = 0,
    return_builder: bool = False,
    optimize: bool = True,
    filename: str | PathLike[str] | None = None,
    **more: Any,
) -> onnx.ModelProto | tuple[onnx.ModelProto, Program]:
    """Export by `sardonyx.export`, to a ModelProto; with `return_builder`, return the `Program` too.

    Graphs and arguments of a `torch.compile` backend are accepted too; SymInts are dynamic sizes. The model has only
    standard operators, unless the patterns or the opsets name ONNX Runtime's. Other arguments are passed to
    `sardonyx.export`.

    >>> [node.op_type for node in to_onnx(torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)).graph.node]
    ['Gemm']
    """
    check_keywords(more, to_onnx, export)
    chosen = options or OptimizationOptions()
    _show_logs(max(verbose, chosen.verbose))
    opsets = target_opset if isinstance(target_opset, Mapping) else {"": target_opset}
    more = {name: value for name, value in more.items() if not isinstance(value, OxsDispatcher)}
    with _disable_current_modes():  # a backend runs under fake tensor mode
        program = export(
            mod,
            args,
            kwargs,
            opset=opsets.get(""),
            input_names=input_names or (),
            optimize=chosen.optimize if optimize else "none",
            domains=[*chosen.domains, *(domain for domain in opsets if domain and domain not in chosen.domains)],
            **_drop_without_effect(more),
        )
        if filename is not None:
            program.save(filename)
        proto = program.proto()
    return (proto, program) if return_builder else proto


# onnx-mlir's package for torch

_ENGINE = "onnx-mlir"
_INTERCEPT = "onnxmlir-intercept"
_ONNXMLIR_NAMES = {"compiler_image_name": "compiler_image", "compile_args": "compile_options", _INTERCEPT: "intercept"}
_NO_IMAGE = (None, "None", "local")
_WITHOUT_EFFECT_ON_ONNXMLIR = {
    "compile_tag": "every library gets a unique tag",
    "temp_dir": "libraries are cached in cache_dir",
    "debug": "an error carries the compiler's log",
}


def onnxmlir_backend(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Any = None, mode: str | None = None
) -> Callable[..., Any]:
    """A backend for `torch.compile` that uses onnx-mlir; it accepts that package's options, and ours.

    With `"onnxmlir-intercept"` nothing is compiled: the arguments of each graph are printed, and torch runs it.
    """
    chosen = _from_onnxmlir_options(options or {})
    if _INTERCEPT in (options or {}) and Options.of(chosen).intercept:
        return show_graph_calls(graph, graph, chosen["intercept"])
    return dynamo.sardonyx(graph, inputs, options=chosen, mode=mode)


onnxmlir_backend.reset = dynamo.reset  # type: ignore[attr-defined]  # dynamo's convention


def ONNXMLIRTorch(mod: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """`sardonyx.compile` with onnx-mlir; it accepts that package's options, and ours."""
    from sardonyx.doors import module

    return module.compile(mod, **_from_onnxmlir_options(options))


def compile(mod: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """The same as `ONNXMLIRTorch`."""
    return ONNXMLIRTorch(mod, **options)


def interceptForward(model: torch.nn.Module) -> torch.nn.Module:
    """Print the arguments of each call; `sardonyx.intercept` does more."""
    return intercept(model)


def _from_onnxmlir_options(options: Any) -> dict[str, Any]:
    """Convert options of onnx-mlir's package to ours; unknown ones stay, so that they raise later."""
    if not isinstance(options, Mapping):
        raise OptionError(f"options is {type(options).__name__}", hint='use a dict, or backend="sardonyx"')
    effective = _drop_without_effect(options, _WITHOUT_EFFECT_ON_ONNXMLIR)
    engine = {"container": effective.pop("container_engine", None)}
    if effective.get("compiler_image_name") in _NO_IMAGE:
        effective.pop("compiler_image_name", None)
    elif "compiler_path" in effective:
        engine["binary"] = effective.pop("compiler_path")
    chosen = {"engine": _ENGINE} | {_ONNXMLIR_NAMES.get(name, name): value for name, value in effective.items()}
    settings = {name: value for name, value in engine.items() if value is not None}
    if settings:
        chosen["engine_options"] = {**settings, **(chosen.get("engine_options") or {})}
    return chosen


def _drop_without_effect(
    arguments: Mapping[str, Any], without_effect: Mapping[str, str] = _WITHOUT_EFFECT
) -> dict[str, Any]:
    """Return the arguments without those that have no effect, which are logged."""
    for name in arguments:
        if name in without_effect:
            log.info("%s has no effect: %s", name, without_effect[name])
    return {name: value for name, value in arguments.items() if name not in without_effect}


def _terms(patterns: Patterns) -> list[str]:
    """Split a selection of patterns into names; a minus excludes one."""
    return re.findall(r"-?\w+", patterns if isinstance(patterns, str) else ",".join(patterns or ()))


def _rules(patterns: Patterns, without: Patterns = None) -> str:
    """Convert a selection of patterns to a value of the option `optimize`."""
    terms = _terms(patterns)
    level = "default" if any(term in _PATTERN_SETS for term in terms) else "none"
    names = [term if term.startswith("-") else f"+{term}" for term in terms if term not in _PATTERN_SETS]
    return level + "".join(names) + "".join(f"-{name}" for name in _terms(without))


def _level(name: str) -> Any:
    from onnxruntime import GraphOptimizationLevel as Level

    if name not in Level.__members__:
        raise OptionError(f"ort_optimization_level is {name!r}", hint="use one of " + ", ".join(Level.__members__))
    return Level.__members__[name]


def _show_logs(verbose: int) -> None:
    """Show our logs, as `TORCH_LOGS` does: 1 for each stage, more for everything."""
    if not verbose:
        return
    ours = logging.getLogger("sardonyx")
    ours.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())
