"""Intermediate values of a model run in one way, one after the other, in bounded memory."""

from __future__ import annotations

import dataclasses
import logging
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import ShapeInferencePass
from torch.utils import _pytree as pytree

from sardonyx import dtypes
from sardonyx.diagnose.comparison.blocked import show_blocked
from sardonyx.diagnose.comparison.run_config import RunConfig, level
from sardonyx.diagnose.comparison.subject import Feeds, Subject, leaves_of
from sardonyx.engines.registry import find as find_engine
from sardonyx.errors import EngineError, OptionError, SardonyxError
from sardonyx.model_files import LARGEST_PROTOBUF, weight_bytes
from sardonyx.native import native
from sardonyx.optimize import optimize
from sardonyx.optimize.selection import select_rules
from sardonyx.options import Options

log = logging.getLogger(__name__)

_UNKNOWN = 4
"""Fraction of the budget that a value of unknown size is assumed to take."""


class Trace(ABC):
    """A model run in one way: its outputs and intermediate values."""

    config: RunConfig
    keys: Mapping[str, str]
    """Names of its values here, by their names in the unoptimized graph."""

    @abstractmethod
    def outputs(self, call: int) -> list[torch.Tensor]:
        """Return the results of a call, without intermediate outputs."""

    @abstractmethod
    def values(self, keys: Sequence[str], call: int) -> Iterator[torch.Tensor]:
        """Iterate over values of a call; keys are in the order of the graph."""

    @abstractmethod
    def reads(self, name: str) -> list[str]:
        """Return the names of the values that a value is computed from."""

    def is_substitute(self, key: str) -> bool:
        """Whether a value that a rule created is used instead: later rules may have changed its meaning."""
        return False


def trace_of(config: RunConfig, subject: Subject, budget: int) -> Trace:
    """Return the trace of a subject for a configuration."""
    return TorchTrace(config, subject) if config.is_torch else OnnxTrace(config, subject, budget)


# torch


class TorchTrace(Trace):
    """The graph that torch.export traced, node by node in torch."""

    def __init__(self, config: RunConfig, subject: Subject) -> None:
        if subject.captured is None:
            raise OptionError(
                f"{config} needs the module, but an ONNX model is given",
                hint="compare engines: ways=('reference', 'onnxruntime')",
            )
        self.config, self._subject, self._captured = config, subject, subject.captured
        self.keys = subject.fx
        self._nodes = {node.name: node for node in self._captured.graph.graph.nodes}

    def outputs(self, call: int) -> list[torch.Tensor]:
        """Return the module's own results; in another precision, those of the graph."""
        if self.config.dtype is not None:
            return list(self.values(self._subject.outputs, call))
        args, kwargs = self._subject.arguments[call]
        with torch.no_grad():
            leaves = pytree.tree_leaves(self._subject.module(*args, **kwargs))
        first = {node: leaf for node, leaf in zip(self._captured.returned, leaves, strict=True) if _is_node(node)}
        return [torch.as_tensor(leaf) for leaf in first.values()]

    def values(self, keys: Sequence[str], call: int) -> Iterator[torch.Tensor]:
        """Run the graph; values are freed after their last use."""
        run = Interpreter(self._captured.graph, self.config.dtype)
        run.env = dict(zip(self._placeholders, self._arguments(call), strict=True))
        names = [self.keys[key] for key in keys]
        wanted, computed, at = set(names), dict[str, Any](), 0
        for node in self._captured.graph.graph.nodes:
            if node.op == "output":
                continue
            if node.op != "placeholder":
                with torch.no_grad():
                    run.env[node] = run.run_node(node)
            if node.name in wanted:
                computed[node.name] = run.env[node]
            for done in run.user_to_last_uses.get(node, ()):
                run.env.pop(done, None)
            while at < len(names) and names[at] in computed:
                name = names[at]
                at += 1
                yield torch.as_tensor(computed[name] if name in names[at:] else computed.pop(name))
                if at == len(names):
                    return

    def reads(self, name: str) -> list[str]:
        """Return the names of a node's input nodes."""
        return [node.name for node in self._nodes[name].all_input_nodes]

    @cached_property
    def _placeholders(self) -> list[torch.fx.Node]:
        return list(self._captured.graph.graph.find_nodes(op="placeholder"))

    def _arguments(self, call: int) -> list[Any]:
        leaves = leaves_of(self._captured, self._subject.arguments[call])
        weights, inputs = self._captured.weights, self._captured.inputs
        arguments = [weights[i][1] if i in weights else leaves[inputs[i]] for i in range(len(self._placeholders))]
        return [cast_floating(x, self.config.dtype) for x in arguments]


class Interpreter(torch.fx.Interpreter):
    """Runs nodes one by one, optionally in another floating-point dtype."""

    def __init__(self, graph: torch.fx.GraphModule, dtype: torch.dtype | None) -> None:
        super().__init__(graph)
        self._dtype = dtype

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a node's operands; floating-point dtypes among them are replaced."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self._dtype is None:
            return args, kwargs
        args, kwargs = pytree.tree_map_only(torch.dtype, self._replace_dtype, (args, kwargs))
        return args, kwargs

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant of the graph."""
        return cast_floating(super().get_attr(target, args, kwargs), self._dtype)

    def _replace_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        return self._dtype if dtype.is_floating_point else dtype


def cast_floating(x: Any, dtype: torch.dtype | None) -> Any:
    """Cast a floating-point or complex tensor to another precision; return anything else as it is."""
    if dtype is None or not isinstance(x, torch.Tensor):
        return x
    if x.is_complex():
        return x.to(dtype.to_complex())
    return x.to(dtype) if x.is_floating_point() else x


def _is_node(x: Any) -> bool:
    return isinstance(x, torch.fx.Node)


# ONNX


@dataclass(frozen=True)
class _Origin:
    """Replaces FX nodes while rules run, so that new nodes know which value they replace."""

    key: str


class OnnxTrace(Trace):
    """The model as it is given to an engine; its values are computed by as many runs as the budget needs."""

    def __init__(self, config: RunConfig, subject: Subject, budget: int) -> None:
        assert config.options is not None
        self.config, self._subject, self._budget = config, subject, budget
        self.model, self._options = prepare_model(config.options, subject)
        names = _value_names(self.model, subject)
        self._optimized, self._run_options = _optimized_by_engine(self.model, self._options, subject.calls[0])
        blocked = show_blocked(self._optimized, self.model)
        values = {str(x.name): x for node in self._optimized.graph for x in node.outputs}
        self._reads = _reads(values, blocked)
        self._unblocked = frozenset(blocked.values())
        self.keys = {key: name for key, name in names.items() if name in values and values[name].dtype is not None}

    def outputs(self, call: int) -> list[torch.Tensor]:
        """Run the model without intermediate outputs."""
        return run(self.model, self._options, self._subject.calls[call])

    def values(self, keys: Sequence[str], call: int) -> Iterator[torch.Tensor]:
        """Compute the values in portions that fit the budget; each run computes only what its portion needs."""
        feeds = self._subject.calls[call]
        for portion in self._portions([self.keys[key] for key in keys], feeds):
            part = extract(self._optimized, list(feeds), list(dict.fromkeys(portion)))
            results = dict(zip(dict.fromkeys(portion), run(part, self._run_options, feeds), strict=True))
            yield from (results[name] for name in portion)

    def reads(self, name: str) -> list[str]:
        """Return the inputs of a value's producer."""
        return self._reads.get(name, [])

    def is_substitute(self, key: str) -> bool:
        """Whether the value has another name here or was blocked, and is not a result."""
        changed = self.keys[key] != key or self.keys[key] in self._unblocked
        return changed and key not in self._subject.outputs

    def _portions(self, names: Sequence[str], feeds: Feeds) -> Iterator[list[str]]:
        sizes = _bytes(self.model, feeds) | _bytes(self._optimized, feeds)
        portion: list[str] = []
        used = 0
        for name in names:
            size = sizes.get(name) or self._budget // _UNKNOWN
            if portion and used + size > self._budget:
                yield portion
                portion, used = [], 0
            portion.append(name)
            used += size
        if portion:
            yield portion


def _reads(values: Mapping[str, ir.Value], blocked: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of each value's inputs, with blocked values replaced by their unblocked names."""
    inputs = {name: [str(x.name) for x in _inputs(value)] for name, value in values.items()}
    inputs |= {plain: inputs[name] for name, plain in blocked.items() if inputs.get(plain) == [name]}
    return {name: [blocked.get(x, x) for x in read] for name, read in inputs.items()}


def _inputs(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    return [x for x in node.inputs if x is not None] if node is not None else []


def run(model: ir.Model, options: Options, feeds: Feeds) -> list[torch.Tensor]:
    """Run a model in an engine without rewriting it, and return its outputs."""
    return runner(model, options)(feeds)


def runner(model: ir.Model, options: Options) -> Callable[[Feeds], list[torch.Tensor]]:
    """Return a function that runs a model in an engine without rewriting it; the first call loads it."""
    from sardonyx.doors.optimize import optimize as door

    chosen = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    chosen |= {"optimize": "none", "native": False, "cache_dir": "", "opset": None}
    for node in model.graph.all_nodes():
        if isinstance(node.meta.get("fx"), _Origin):
            del node.meta["fx"]  # only rules read it
    program = door(model, **chosen)
    names = [str(x.name) for x in model.graph.inputs if not x.is_initializer()]

    def call(feeds: Feeds) -> list[torch.Tensor]:
        try:
            results = program(*(feeds[name] for name in names))
        except SardonyxError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine {options.engine!r} cannot run the model: {error}", hint=_OTHER_ENGINE_HINT
            ) from error
        return list(results) if isinstance(results, tuple) else [results]

    return call


_OTHER_ENGINE_HINT = "use another engine; sardonyx.engines() lists them"


def extract(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """Return the part of a model that computes these outputs."""
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def prepare_model(options: Options, subject: Subject) -> tuple[ir.Model, Options]:
    """Return the model as it is given to the engine: after rewrite rules, with native kernels."""
    model = apply_rules(options, subject)
    if options.native is True and find_engine(options.engine).takes_kernels(torch.device("cpu")):
        library = native(model, options)
        if library is not None:
            options = with_session(options, custom_ops=[str(library)])
    return model, options


def apply_rules(options: Options, subject: Subject) -> ir.Model:
    """Apply the rules that the options select; each node knows the value that it replaces."""
    model = subject.base.clone()
    for node in model.graph.all_nodes():
        node.meta["fx"] = _Origin(str(node.outputs[0].name))
    engine, names = find_engine(options.engine), select_rules(options.optimize)
    if names:
        operators = {node.op_type for node in model.graph.all_nodes()}
        compiled = subject.captured is not None  # as in torch.compile, whose models are not saved
        local = engine.local_domains(torch.device("cpu"), operators) if compiled else frozenset()
        optimize(model, domains=engine.domains | local, names=names)
    return model


def with_session(options: Options, **more: Any) -> Options:
    """Return options with further session options."""
    session = options.session_options or {}
    if not isinstance(session, Mapping):
        raise OptionError("session_options is an object, to which entries cannot be added", hint="use a dict")
    libraries = [*session.get("custom_ops", ()), *more.pop("custom_ops", ())]
    merged = {**session, **more, **({"custom_ops": libraries} if libraries else {})}
    return Options.of(options, session_options=merged)


def _value_names(model: ir.Model, subject: Subject) -> dict[str, str]:
    """Return the names in the rewritten graph of values of the unoptimized one: the same, or that of a replacement.

    The last node that a rule creates computes the value that it replaces.
    """
    names = {str(x.name) for node in model.graph for x in node.outputs}
    replacements: dict[str, str] = {}
    for node in model.graph:
        origin = node.meta.get("fx")
        if isinstance(origin, _Origin):
            replacements[origin.key] = str(node.outputs[0].name)
    ends = dict(zip(subject.outputs, (str(x.name) for x in model.graph.outputs), strict=True))
    mapped = {key: key if key in names else replacements.get(key) for key in subject.places}
    return {key: name for key, name in {**mapped, **ends}.items() if name is not None and name in names}


def _optimized_by_engine(model: ir.Model, options: Options, feeds: Feeds) -> tuple[ir.Model, Options]:
    """Return the model after ONNX Runtime's own rewrites, and options to run it without further ones.

    Requesting an intermediate value as an output prevents fusions. So ONNX Runtime writes its optimized model, and
    values are computed from that. For other engines the model is returned as it is.
    """
    session = options.session_options or {}
    if not find_engine(options.engine).takes_session_options or not isinstance(session, Mapping):
        return model, options
    off = level("none")
    if session.get("graph_optimization_level") == off:
        return model, options
    if weight_bytes(model) > LARGEST_PROTOBUF:
        log.warning("the weights are too large for onnxruntime to write its optimized model: fusions are not compared")
        return model, options
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "optimized.onnx")
        copy = model.clone()
        for name, value in copy.graph.initializers.items():  # inline weights, which the file must hold
            if value.const_value is not None:
                value.const_value = ir.Tensor(value.const_value.numpy(), name=name)
        run(copy, with_session(options, optimized_model_filepath=str(path), log_severity_level=4), feeds)
        optimized = ir.from_proto(ir.to_proto(ir.load(path)))
    return optimized, with_session(options, graph_optimization_level=off)


def _bytes(model: ir.Model, feeds: Feeds) -> dict[str, int]:
    """Return the bytes of each value whose shape is known from those of the inputs."""
    known = model
    if any(x.shape is None or x.shape.has_unknown_dim() or not x.shape.is_static() for x in model.graph.inputs):
        known = model.clone()
        for value in known.graph.inputs:
            if str(value.name) in feeds:
                value.shape = ir.Shape(feeds[str(value.name)].shape)
        for node in known.graph:
            for output in node.outputs:
                output.shape = None
        known = ShapeInferencePass(check_type=False, strict_mode=False)(known).model
    values = [x for node in known.graph for x in node.outputs if x.dtype is not None and x.shape is not None]
    return {str(x.name): math.prod(x.shape.numpy()) * _width(x) for x in values if x.shape and x.shape.is_static()}


def _width(value: ir.Value) -> int:
    assert value.dtype is not None
    return dtypes.to_torch(value.dtype).itemsize if value.dtype in _TENSORS else 8


_TENSORS = frozenset(x for x in ir.DataType if x not in (ir.DataType.UNDEFINED, ir.DataType.STRING))
