"""The values that a way of running a model goes through, one after the other, in bounded memory."""

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
from sardonyx.native import native
from sardonyx.optimize import optimize
from sardonyx.optimize.selection import selected
from sardonyx.options import Options

log = logging.getLogger(__name__)

_LARGEST = 2**31 - 2**24
"""Bytes of weights up to which ONNX Runtime is asked for the model that it makes of one."""
_UNKNOWN = 4
"""Values of unknown size are taken to be this part of the budget."""


class Trace(ABC):
    """A model run in one way: its outputs, and the values on the way to them."""

    way: RunConfig
    keys: Mapping[str, str]
    """The values that it has, by their names in the graph without rewrites: their names here."""

    @abstractmethod
    def outputs(self, call: int) -> list[torch.Tensor]:
        """The results of a call, with nothing watched."""

    @abstractmethod
    def values(self, keys: Sequence[str], call: int) -> Iterator[torch.Tensor]:
        """The values of a call, one after the other; keys are in the order of the graph."""

    @abstractmethod
    def reads(self, name: str) -> list[str]:
        """The values, by their names here, that one of these names is computed from."""

    def stands_in(self, key: str) -> bool:
        """Whether what a rule made is taken for the value: later rules may have moved it, and it is then another."""
        return False


def trace_of(way: RunConfig, subject: Subject, budget: int) -> Trace:
    """How a subject is run in a way."""
    return TorchTrace(way, subject) if way.is_torch else OnnxTrace(way, subject, budget)


# torch


class TorchTrace(Trace):
    """The graph that torch.export traced, node by node in torch."""

    def __init__(self, way: RunConfig, subject: Subject) -> None:
        if subject.captured is None:
            raise OptionError(
                f"{way} needs the module, and an ONNX model is given",
                hint="compare engines: ways=('reference', 'onnxruntime')",
            )
        self.way, self._subject, self._captured = way, subject, subject.captured
        self.keys = subject.fx
        self._nodes = {node.name: node for node in self._captured.graph.graph.nodes}

    def outputs(self, call: int) -> list[torch.Tensor]:
        """The module's own results, in its own precision; else those of the graph."""
        if self.way.dtype is not None:
            return list(self.values(self._subject.outputs, call))
        args, kwargs = self._subject.arguments[call]
        with torch.no_grad():
            leaves = pytree.tree_leaves(self._subject.module(*args, **kwargs))
        first = {node: leaf for node, leaf in zip(self._captured.returned, leaves, strict=True) if _is_node(node)}
        return [torch.as_tensor(leaf) for leaf in first.values()]

    def values(self, keys: Sequence[str], call: int) -> Iterator[torch.Tensor]:
        """Run the graph; a value is dropped when it is given and nothing reads it any more."""
        run = Interpreter(self._captured.graph, self.way.dtype)
        run.env = dict(zip(self._placeholders, self._arguments(call), strict=True))
        waiting = [self.keys[key] for key in keys]
        wanted, kept, at = set(waiting), dict[str, Any](), 0
        for node in self._captured.graph.graph.nodes:
            if node.op == "output":
                continue
            if node.op != "placeholder":
                with torch.no_grad():
                    run.env[node] = run.run_node(node)
            if node.name in wanted:
                kept[node.name] = run.env[node]
            for done in run.user_to_last_uses.get(node, ()):
                run.env.pop(done, None)
            while at < len(waiting) and waiting[at] in kept:
                name = waiting[at]
                at += 1
                yield torch.as_tensor(kept[name] if name in waiting[at:] else kept.pop(name))
                if at == len(waiting):
                    return

    def reads(self, name: str) -> list[str]:
        """The names of the nodes that a node reads."""
        return [node.name for node in self._nodes[name].all_input_nodes]

    @cached_property
    def _placeholders(self) -> list[torch.fx.Node]:
        return list(self._captured.graph.graph.find_nodes(op="placeholder"))

    def _arguments(self, call: int) -> list[Any]:
        leaves = leaves_of(self._captured, self._subject.arguments[call])
        held, given = self._captured.held, self._captured.given
        found = [held[i][1] if i in held else leaves[given[i]] for i in range(len(self._placeholders))]
        return [cast_floating(x, self.way.dtype) for x in found]


class Interpreter(torch.fx.Interpreter):
    """Runs nodes one by one, and computes in another precision if asked to."""

    def __init__(self, graph: torch.fx.GraphModule, dtype: torch.dtype | None) -> None:
        super().__init__(graph)
        self._dtype = dtype

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A node's operands; a dtype among them is the one that is computed in."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self._dtype is None:
            return args, kwargs
        args, kwargs = pytree.tree_map_only(torch.dtype, self._wider, (args, kwargs))
        return args, kwargs

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A constant of the graph."""
        return cast_floating(super().get_attr(target, args, kwargs), self._dtype)

    def _wider(self, dtype: torch.dtype) -> torch.dtype | None:
        return self._dtype if dtype.is_floating_point else dtype


def cast_floating(x: Any, dtype: torch.dtype | None) -> Any:
    """A tensor of real or complex numbers in another precision; anything else, and without one, as it is."""
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
    """Takes the place of an FX node while rules run: what they make remembers the value it stands for."""

    key: str


class OnnxTrace(Trace):
    """The model as an engine is given it, and its values, fetched by as many runs as the budget takes."""

    def __init__(self, way: RunConfig, subject: Subject, budget: int) -> None:
        assert way.options is not None
        self.way, self._subject, self._budget = way, subject, budget
        self.model, self._options = prepare_model(way.options, subject)
        names = _value_names(self.model, subject)
        self._watched, self._watching = _optimized_by_engine(self.model, self._options, subject.calls[0])
        blocked = show_blocked(self._watched, self.model)
        made = {str(x.name): x for node in self._watched.graph for x in node.outputs}
        self._reads = _reads(made, blocked)
        self._unblocked = frozenset(blocked.values())
        self.keys = {key: name for key, name in names.items() if name in made and made[name].dtype is not None}

    def outputs(self, call: int) -> list[torch.Tensor]:
        """Run the model as a user would."""
        return run(self.model, self._options, self._subject.calls[call])

    def values(self, keys: Sequence[str], call: int) -> Iterator[torch.Tensor]:
        """Fetch the values in portions that fit the budget; each run computes no more than its portion needs."""
        feeds = self._subject.calls[call]
        for portion in self._portions([self.keys[key] for key in keys], feeds):
            cut = extract(self._watched, list(feeds), list(dict.fromkeys(portion)))
            found = dict(zip(dict.fromkeys(portion), run(cut, self._watching, feeds), strict=True))
            yield from (found[name] for name in portion)

    def reads(self, name: str) -> list[str]:
        """The values that the node of one reads."""
        return self._reads.get(name, [])

    def stands_in(self, key: str) -> bool:
        """Whether the value has another name here or was kept in blocks, and is no result."""
        changed = self.keys[key] != key or self.keys[key] in self._unblocked
        return changed and key not in self._subject.outputs

    def _portions(self, names: Sequence[str], feeds: Feeds) -> Iterator[list[str]]:
        sizes = _bytes(self.model, feeds) | _bytes(self._watched, feeds)
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


def _reads(made: Mapping[str, ir.Value], blocked: Mapping[str, str]) -> dict[str, list[str]]:
    """For each value the names of those its node reads; one that is in blocks goes by the name it has without."""
    found = {name: [str(x.name) for x in _inputs(value)] for name, value in made.items()}
    found |= {plain: found[name] for name, plain in blocked.items() if found.get(plain) == [name]}
    return {name: [blocked.get(x, x) for x in read] for name, read in found.items()}


def _inputs(value: ir.Value) -> list[ir.Value]:
    node = value.producer()
    return [x for x in node.inputs if x is not None] if node is not None else []


def run(model: ir.Model, options: Options, feeds: Feeds) -> list[torch.Tensor]:
    """A model's outputs, in an engine, with nothing rewritten any more."""
    return runner(model, options)(feeds)


def runner(model: ir.Model, options: Options) -> Callable[[Feeds], list[torch.Tensor]]:
    """A function of inputs that gives a model's outputs; the first call makes it ready."""
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
            found = program(*(feeds[name] for name in names))
        except SardonyxError:
            raise
        except Exception as error:
            raise EngineError(
                f"the engine {options.engine!r} cannot run the model: {error}", hint=_OTHER_ENGINE_HINT
            ) from error
        return list(found) if isinstance(found, tuple) else [found]

    return call


_OTHER_ENGINE_HINT = "compare with another one; sardonyx.engines() lists them"


def extract(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> ir.Model:
    """What of a model computes some of its values."""
    graph = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


def prepare_model(options: Options, subject: Subject) -> tuple[ir.Model, Options]:
    """The model as the engine is given it: rewritten, and with kernels of its own."""
    model = apply_rules(options, subject)
    if options.native is True and find_engine(options.engine).takes_kernels(torch.device("cpu")):
        library = native(model, options)
        if library is not None:
            options = with_session(options, custom_ops=[str(library)])
    return model, options


def apply_rules(options: Options, subject: Subject) -> ir.Model:
    """The model after the rules that the options choose; each node knows the value it stands for."""
    model = subject.base.clone()
    for node in model.graph.all_nodes():
        node.meta["fx"] = _Origin(str(node.outputs[0].name))
    engine, names = find_engine(options.engine), selected(options.optimize)
    if names:
        operators = {node.op_type for node in model.graph.all_nodes()}
        compiled = subject.captured is not None  # as torch.compile does it, which keeps nothing for other machines
        local = engine.local_domains(torch.device("cpu"), operators) if compiled else frozenset()
        optimize(model, domains=engine.domains | local, names=names)
    return model


def with_session(options: Options, **more: Any) -> Options:
    """Options with further session options."""
    given = options.session_options or {}
    if not isinstance(given, Mapping):
        raise OptionError("session_options is an object, and some have to be added to it", hint="give them as a dict")
    libraries = [*given.get("custom_ops", ()), *more.pop("custom_ops", ())]
    merged = {**given, **more, **({"custom_ops": libraries} if libraries else {})}
    return Options.of(options, session_options=merged)


def _value_names(model: ir.Model, subject: Subject) -> dict[str, str]:
    """For values of the graph without rewrites, their names in the rewritten one: the same, or what took their place.

    A rule says that what it makes equals what it replaces, and the last of the nodes it made is that.
    """
    here = {str(x.name) for node in model.graph for x in node.outputs}
    stands: dict[str, str] = {}
    for node in model.graph:
        origin = node.meta.get("fx")
        if isinstance(origin, _Origin):
            stands[origin.key] = str(node.outputs[0].name)
    ends = dict(zip(subject.outputs, (str(x.name) for x in model.graph.outputs), strict=True))
    found = {key: key if key in here else stands.get(key) for key in subject.places}
    return {key: name for key, name in {**found, **ends}.items() if name is not None and name in here}


def _optimized_by_engine(model: ir.Model, options: Options, feeds: Feeds) -> tuple[ir.Model, Options]:
    """The model after ONNX Runtime's own rewrites, to be run without further ones; of other engines as it is.

    To ask for a value inside what would be fused prevents the fusion. So the session is asked for what it makes of the
    model, and values are fetched from that.
    """
    given = options.session_options or {}
    if not find_engine(options.engine).takes_session_options or not isinstance(given, Mapping):
        return model, options
    off = level("none")
    if given.get("graph_optimization_level") == off:
        return model, options
    if _weight_bytes(model) > _LARGEST:
        log.warning("the weights are too large to ask onnxruntime for its model: values are fetched as they come")
        return model, options
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "optimized.onnx")
        inside = model.clone()
        for name, value in inside.graph.initializers.items():  # a file that holds them, not the session's sharing
            if value.const_value is not None:
                value.const_value = ir.Tensor(value.const_value.numpy(), name=name)
        run(inside, with_session(options, optimized_model_filepath=str(path), log_severity_level=4), feeds)
        made = ir.from_proto(ir.to_proto(ir.load(path)))
    return made, with_session(options, graph_optimization_level=off)


def _weight_bytes(model: ir.Model) -> int:
    held = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def _bytes(model: ir.Model, feeds: Feeds) -> dict[str, int]:
    """The size of each value, as far as the sizes of the inputs tell it."""
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
