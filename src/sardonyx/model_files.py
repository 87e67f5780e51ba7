"""Load and check a user's ONNX model, from a file, bytes or memory.

Models are untrusted: external weights are read from the model's own folder only, nodes are sorted topologically, and
missing or damaged parts are errors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import onnx
import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from sardonyx.errors import SardonyxError

log = logging.getLogger(__name__)

_REWRITE = "export or copy the file again"
_OPTIONAL_INPUTS = 4
"""IR version from which an input with an initializer is an input with a default value."""
_OWN_DOMAIN = "sardonyx"
_MICROSOFT = "com.m"
"""Prefix of the domains of onnxruntime's operators: com.microsoft, com.microsoft.nchwc, com.ms.internal.nhwc."""
_ONE_FOLDER = "put all files of the model in one folder"


LARGEST_PROTOBUF = 2**31 - 2**24
"""Protobuf refuses messages of 2 GiB; some room is left for the graph beside the weights."""


class HasModel(Protocol):
    """An object with a model, as `sardonyx.export` and `sardonyx.optimize` return."""

    model: ir.Model


UserModel: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model | HasModel"
"""A path, the content of a file, a model in memory, or a `Program`."""


def weight_bytes(model: ir.Model) -> int:
    """The size of a model's weights."""
    return sum(tensor.nbytes for tensor in _initializers(model.graph))


def is_onnx(model: object) -> bool:
    """Whether it is a model that `load_model` reads."""
    known = isinstance(model, (str, os.PathLike, bytes, onnx.ModelProto, ir.Model))
    return known or isinstance(getattr(model, "model", None), ir.Model)


def load_model(model: UserModel) -> ir.Model:
    """Load a model that the caller may edit; the argument is not modified, and weights are not copied."""
    if isinstance(model, (str, os.PathLike)):
        return _load_file(Path(model))
    if isinstance(model, bytes):
        return _load_bytes(model)
    if isinstance(model, onnx.ModelProto):
        return _load_proto(model, "the model")
    inner = model if isinstance(model, ir.Model) else getattr(model, "model", None)
    if isinstance(inner, ir.Model):
        return _copy(inner)
    raise TypeError(
        "a model must be a path, bytes, an onnx.ModelProto, an onnx_ir.Model or a sardonyx.Program, "
        f"not {type(model).__name__}"
    )


def _load_file(path: Path) -> ir.Model:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    with _wrap_reader_errors(str(path)):
        model = ir.load(path)
        for function in model.functions.values():
            ir.external_data.set_base_dir(function.graph, path.parent)  # the reader does so for graphs alone
        loaded = _check_and_sort(model, str(path))
        for function in loaded.functions.values():
            _read_constants(function.graph)
        return loaded


def _read_constants(graph: ir.Graph) -> None:
    """Read the constants of a function from their files: a saved model would not have them."""
    for node in RecursiveGraphIterator(graph):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                stored = attribute.value
                node.attributes[name] = ir.AttrTensor(
                    name, ir.Tensor(stored.numpy(), dtype=stored.dtype, name=stored.name)
                )


def _load_bytes(content: bytes) -> ir.Model:
    try:
        proto = onnx.load_model_from_string(content)
    except Exception as error:
        raise SardonyxError(f"these {len(content)} bytes are not an ONNX model: {_first_line(error)}") from error
    return _load_proto(proto, "the model")


def _load_proto(proto: onnx.ModelProto, name: str) -> ir.Model:
    with _wrap_reader_errors(name):
        return _check_and_sort(ir.from_proto(proto), name)


def _copy(model: ir.Model) -> ir.Model:
    _check_values(model, "the model")
    if not _is_sorted(model):
        raise SardonyxError("the model's nodes are not sorted topologically", hint="call model.graph.sort() first")
    _check_weights(model, "the model")
    copy = model.clone()
    _make_defaults_constant(copy, "the model")
    return copy


@contextmanager
def _wrap_reader_errors(name: str) -> Iterator[None]:
    """Convert errors of the ONNX reader to `SardonyxError`, and suppress its logs."""
    try:
        with capture_logs([], "onnx_ir"):
            yield
    except SardonyxError:
        raise
    except Exception as error:
        raise SardonyxError(f"{name} cannot be read as an ONNX model: {_first_line(error)}", hint=_REWRITE) from error


@contextmanager
def quiet_onnx_ir() -> Iterator[None]:
    """While active, onnx_ir's failed passes are logged in one line instead of a traceback on stderr."""
    lines: list[str] = []
    with capture_logs(lines, "onnx_ir"):
        yield
    if lines:
        log.info("onnx_ir: %s", lines[-1])


@contextmanager
def capture_logs(lines: list[str], name: str) -> Iterator[None]:
    """While active, log records of a package are appended to `lines` instead of being shown."""
    logger, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: lines.extend(handler.format(record).splitlines())  # type: ignore[method-assign]
    before = logger.propagate, logger.handlers
    logger.propagate, logger.handlers = False, [handler]
    try:
        yield
    finally:
        logger.propagate, logger.handlers = before


def _check_and_sort(model: ir.Model, name: str) -> ir.Model:
    if not model.opset_imports:  # protobuf reads an empty file as an empty message
        raise SardonyxError(f"{name} is not an ONNX model: it is empty", hint=_REWRITE)
    _check_values(model, name)
    _sort(model, name)
    _check_weights(model, name)
    _make_defaults_constant(model, name)
    _warn_unknown_operators(model, name)
    return model


def _make_defaults_constant(model: ir.Model, name: str) -> None:
    """Make inputs with default values constants, which rules and kernels can use."""
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        model.graph.inputs.remove(value)
        if model.ir_version >= _OPTIONAL_INPUTS:
            log.warning("%s has a default value for its input %r, which is used as a constant", name, value.name)


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield model.graph
    for function in model.functions.values():
        yield function.graph


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in _graphs(model):
        yield from RecursiveGraphIterator(graph)


def _check_values(model: ir.Model, name: str) -> None:
    """Check that every value which is read or returned has a producer."""
    read = [(value, f"{node.op_type} reads") for node in _nodes(model) for value in node.inputs if value is not None]
    read += [(value, "it returns") for graph in _graphs(model) for value in graph.outputs]
    read += [(value, "a branch returns") for graph in _subgraphs(model) for value in graph.outputs]
    for value, who in read:
        if not (value.producer() or value.is_graph_input() or value.is_initializer()):
            raise SardonyxError(
                f"{name} is incomplete: {who} {value.name!r}, which no node produces",
                hint="export it again, with that value as an input of the model",
            )


def _subgraphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Iterate over the graphs in attributes: branches and loop bodies."""
    yield from _in_attributes(model, ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _in_attributes(model: ir.Model, one: ir.AttributeType, several: ir.AttributeType) -> Iterator[Any]:
    """Iterate over the values of attributes of these types."""
    for node in _nodes(model):
        for attribute in node.attributes.values():
            if attribute.type == one and attribute.value is not None:
                yield attribute.value
            elif attribute.type == several and attribute.value is not None:
                yield from attribute.value


# Order


def _sort(model: ir.Model, name: str) -> None:
    if _is_sorted(model):
        return
    try:
        for graph in _graphs(model):
            graph.sort()
    except ValueError as error:
        raise SardonyxError(f"{name} is not an ONNX model: its nodes form a cycle", hint=_REWRITE) from error
    log.warning("%s is not sorted topologically, as ONNX requires: its nodes were sorted", name)


def _is_sorted(model: ir.Model) -> bool:
    """Whether every node comes after the producers of its inputs, in subgraphs too."""
    seen: set[ir.Node] = set()
    for node in _nodes(model):
        producers = {value.producer() for value in node.inputs if value is not None} - {None}
        if not producers <= seen:
            return False
        seen.add(node)
    return True


# Operators


def _warn_unknown_operators(model: ir.Model, name: str) -> None:
    """Warn of undefined operators: such a file can be rewritten, but running it needs a library."""
    defined = {(function.domain, function.name) for function in model.functions.values()}
    used = dict.fromkeys((node.domain, node.op_type) for node in _nodes(model))
    unknown = [".".join(filter(None, key)) for key in used if key not in defined and not _is_known(*key)]
    if unknown:
        log.warning(
            "%s has unknown operators, and runs only with a library that has them: %s",
            name,
            ", ".join(unknown),
        )


def _is_known(domain: str, op_type: str) -> bool:
    if domain.startswith(_OWN_DOMAIN) or onnx.defs.has(op_type, "" if domain == "ai.onnx" else domain):
        return True
    contributed = _onnxruntime_operators() if domain.startswith(_MICROSOFT) else frozenset()
    return contributed is None or (domain, op_type) in contributed


@cache
def _onnxruntime_operators() -> frozenset[tuple[str, str]] | None:
    """Return the operators in onnxruntime's own domains; None if it is not installed."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError:
        return None
    return frozenset((schema.domain, schema.name) for schema in state.get_all_operator_schema())


# Weights


def _check_weights(model: ir.Model, name: str) -> None:
    for tensor in _tensors(model):
        if tensor.dtype == ir.DataType.UNDEFINED or any(isinstance(dim, int) and dim < 0 for dim in tensor.shape):
            raise SardonyxError(
                f"{name} has a weight {tensor.name!r} without a type or with a negative size", hint=_REWRITE
            )
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(tensor, name)


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Iterate over all constants of a model: initializers of all graphs and functions, and tensor attributes."""
    for graph in (*_graphs(model), *_subgraphs(model)):
        yield from _initializers(graph)
    yield from _in_attributes(model, ir.AttributeType.TENSOR, ir.AttributeType.TENSORS)


def _initializers(graph: ir.Graph) -> Iterator[ir.TensorProtocol]:
    for value in graph.initializers.values():
        if value.const_value is not None:
            yield value.const_value


def _check_external(tensor: ir.ExternalTensor, name: str) -> None:
    """Check that the file of a weight is in the model's folder, after resolving links, and long enough."""
    prefix = f"{name} has its weight {tensor.name!r} in {tensor.location}"
    folder = Path(tensor.base_dir or ".").resolve()
    location = Path(tensor.location)
    path = (folder / location).resolve()
    if location.is_absolute() or ".." in location.parts or not path.is_relative_to(folder):
        raise SardonyxError(f"{prefix}, which is outside the model's folder", hint=_ONE_FOLDER)
    if not path.is_file():
        raise SardonyxError(f"{prefix}, which does not exist", hint=_ONE_FOLDER)
    begin, size = tensor.offset or 0, path.stat().st_size
    if begin < 0 or begin + max(tensor.nbytes, tensor.length or 0) > size:
        raise SardonyxError(f"{prefix}, which has {size} bytes and is too short for it", hint=_REWRITE)


# Faults


@contextmanager
def blame_invalid_model(model: UserModel) -> Iterator[None]:
    """While active, an unexpected error is replaced by one about the model if the model is invalid."""
    try:
        yield
    except (SardonyxError, KeyboardInterrupt):
        raise
    except Exception as error:
        fault = find_fault(model)
        if fault is None:
            raise
        raise SardonyxError(fault, hint=_REWRITE) from error


def find_fault(model: UserModel) -> str | None:
    """Return why a model is invalid; None if ONNX's checker accepts it."""
    name = str(model) if isinstance(model, (str, os.PathLike)) else "the model"
    try:
        loaded = load_model(model)
    except SardonyxError as error:
        return error.what
    except Exception:
        return None
    fault = _unreadable_weight(loaded) or _checker_error(loaded)
    return fault and f"{name} is not a valid ONNX model: {fault}"


def _unreadable_weight(model: ir.Model) -> str | None:
    for tensor in _tensors(model):
        try:
            tensor.numpy()
        except Exception as error:
            return f"its weight {tensor.name!r} cannot be read: {_first_line(error)}"
    return None


def _checker_error(model: ir.Model) -> str | None:
    if any(isinstance(tensor, ir.ExternalTensor) for tensor in _tensors(model)):
        return None  # the checker would look for their files elsewhere
    try:
        onnx.checker.check_model(ir.to_proto(model), full_check=True)
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
