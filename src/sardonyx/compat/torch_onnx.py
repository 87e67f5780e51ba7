"""The former torch.onnx API: registered symbolic functions, and an export that records shapes in one run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch
from torch._library.utils import is_builtin
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sardonyx import opsets
from sardonyx.customop.torch_registration import add_fake_kernel
from sardonyx.doors.export import export
from sardonyx.doors.program import Program
from sardonyx.errors import DeclarationError, OptionError, Unsupported
from sardonyx.translate import table
from sardonyx.translate.builder import Builder

log = logging.getLogger(__name__)

_WITHOUT_EFFECT = {
    "do_constant_folding": "constants are always folded",
    "dynamo": "there is one exporter",
    "enable_onnx_checker": "onnx.checker.check_model checks a file",
    "example_outputs": "results are known from the trace",
    "export_params": "a file always has its weights",
    "operator_export_type": "an operator without a translation is an error",
    "strip_doc_string": "nodes have no doc strings",
    "training": "a model is exported in its current mode",
    "use_external_data_format": "a file holds its weights up to 2 GB",
    "verbose": "print the program that is returned",
}
"""Arguments that are accepted and ignored, and why."""


# Symbolic functions

_REGISTERED: dict[str, table.Translation | None] = {}
"""Qualified names of operators with symbolic functions, and their previous translations."""


def register_custom_op_symbolic(symbolic_name: str, symbolic_fn: Callable[..., Any], opset_version: int) -> None:
    """Translate an operator, `"mynamespace::op"`, by a function of a builder and the operator's arguments.

    It applies from `opset_version` on, and replaces what was registered before.
    """
    unregister_custom_op_symbolic(symbolic_name, opset_version)
    for overload in _overloads(symbolic_name):
        name = table.name_of(overload)
        _REGISTERED[name] = table.find(overload)
        table.remove(name)
        table.register(name, _translation(overload, symbolic_fn, opset_version))


def unregister_custom_op_symbolic(symbolic_name: str, opset_version: int) -> None:
    """Remove the symbolic function of an operator, and restore its previous translation."""
    for name in map(table.name_of, _overloads(symbolic_name)):
        if name not in _REGISTERED:
            continue
        table.remove(name)
        before = _REGISTERED.pop(name)
        if before is not None:
            table.register(name, before)


def _overloads(symbolic_name: str) -> list[Any]:
    space, _, name = symbolic_name.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None) if name else None
    if packet is None:
        raise DeclarationError(
            f"torch has no operator {symbolic_name!r}", hint="load the library that registers it first"
        )
    return [getattr(packet, overload) for overload in packet.overloads()]


def _translation(overload: Any, symbolic_fn: Callable[..., Any], oldest: int) -> table.Translation:
    arguments = overload._schema.arguments

    def translate(g: Builder, /, *args: Any, **kwargs: Any) -> Any:
        if g.opset < oldest:
            raise Unsupported(f"its symbolic function is for opset {oldest} and newer, but this is {g.opset}")
        values = {a.name: a.default_value for a in arguments}
        values |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        return symbolic_fn(g, *values.values())  # all positional, as in torch.onnx

    return translate


# Export


def onnx_export(
    model: torch.nn.Module | Callable[..., Any],
    args: Sequence[Any] | torch.Tensor,
    f: str | PathLike[str] | None = None,
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    dynamic_axes: Mapping[str, Mapping[int, str] | Sequence[int]] | None = None,
    custom_opsets: Mapping[str, int] | None = None,
    **more: Any,
) -> Program:
    """Export as `torch.onnx.export` did, to the file `f`; other arguments are passed to `sardonyx.export`.

    An operator with a symbolic function but no fake kernel is run once with these arguments, to record the shapes of
    its results. Opsets older than 18 are raised to 18, with a warning.
    """
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    for name in more.keys() & _WITHOUT_EFFECT.keys():
        log.info("%s has no effect: %s", name, _WITHOUT_EFFECT[name])
    options = {name: value for name, value in more.items() if name not in _WITHOUT_EFFECT}
    with _fake_kernels_from_example(model, args):
        program = export(
            model,
            args,
            opset=_opset(opset_version),
            input_names=input_names or (),
            output_names=output_names or (),
            dynamic_shapes=_dynamic_shapes(dynamic_axes, input_names or (), len(args)),
            **options,
        )
    _set_versions(program, custom_opsets or {})
    if f is not None:
        program.save(f)
    return program


def _opset(version: int | None) -> int | None:
    if version is not None and version < opsets.OLDEST:
        log.warning("opset_version is %d; the oldest supported, %d, is used instead", version, opsets.OLDEST)
        return opsets.OLDEST
    return version


def _dynamic_shapes(axes: Any, names: Sequence[str], count: int) -> Any:
    """Return the dynamic sizes by input; those of outputs follow from them."""
    if not axes:
        return None
    if len(names) != count:
        raise OptionError(f"dynamic_axes needs the names of {count} arguments, but input_names has {len(names)}")
    return tuple(_axis_names(name, axes.get(name)) for name in names)


def _axis_names(name: str, axes: Mapping[int, str] | Sequence[int] | None) -> dict[int, str] | None:
    if axes is None:
        return None
    return dict(axes) if isinstance(axes, Mapping) else {axis: f"{name}_dynamic_axes_{axis}" for axis in axes}


def _set_versions(program: Program, versions: Mapping[str, int]) -> None:
    imports = program.model.graph.opset_imports
    for domain, version in versions.items():
        if domain in imports:
            imports[domain] = version
        else:
            log.warning("custom_opsets has %s, but the model has no operator of that domain", domain)


# Operators without a fake kernel


@contextmanager
def _fake_kernels_from_example(model: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """While active, operators with a symbolic function but no fake kernel have one that replays an example call."""
    names = {name for name in _REGISTERED if not is_builtin(table.operator_of(name))}
    if not names:
        yield
        return
    with torch.no_grad(), _ResultRecorder(names) as recorder:
        model(*args)
    with ExitStack() as added:
        for name, calls in recorder.calls.items():
            added.callback(add_fake_kernel(table.operator_of(name), _RecordedFakeKernel(name, calls)))
        yield


class _ResultRecorder(TorchFunctionMode):
    """Records the results of operators, by the dtypes and shapes of their arguments."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {name: {} for name in names}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = table.name_of(func.default if isinstance(func, torch._ops.OpOverloadPacket) else func)
        if name in self.calls:
            self.calls[name][_argument_key((args, kwargs or {}))] = result
        return result


def _argument_key(arguments: Any) -> str:
    """Return a key of the dtypes, shapes and plain values of arguments."""
    return str([(x.dtype, tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in tree_leaves(arguments)])


class _RecordedFakeKernel:
    """A fake kernel that returns results like those of the recorded calls."""

    def __init__(self, name: str, calls: Mapping[str, Any]) -> None:
        self._name, self._calls = name, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._calls.get(_argument_key((args, kwargs)))
        if result is None:
            operator = f"torch.ops.{self._name.replace('::', '.')}"
            raise RuntimeError(
                f"the result of {operator} is known for the sizes of the example only: "
                f"declare its shape by sardonyx.custom_op({operator}, ..., shape=...)"
            )
        return tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), result)
