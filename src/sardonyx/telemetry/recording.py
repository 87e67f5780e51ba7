"""Record the arguments of calls, and replay them: numpy files with JSON inside, without pickle."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from sardonyx.errors import MissingDependency, SardonyxError
from sardonyx.telemetry.calls import Call, Hook

log = logging.getLogger(__name__)

_STRUCTURE = "structure"
_SUFFIX = ".npz"


def record(path: str | os.PathLike[str], *, limit: int = 16) -> Hook:
    """Return a hook that saves the arguments of the first `limit` calls to a folder, for `replay`.

    >>> import sardonyx, tempfile
    >>> model = torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = sardonyx.intercept(model, record(folder))(torch.ones(3, 2))
    ...     [(args[0].shape, kwargs) for args, kwargs in replay(folder)]
    [(torch.Size([3, 2]), {})]
    """
    folder, left, over = Path(path), iter(range(limit)), iter(range(1))
    folder.mkdir(parents=True, exist_ok=True)

    def hook(call: Call) -> None:
        if call.returned:
            return
        if next(left, None) is not None:
            file = _write(folder, call)
            log.info("recorded call %d of %s in %s", call.number, call.name or type(call.module).__name__, file)
        elif next(over, None) is not None:
            log.warning("%s has %d calls, and further ones are not recorded; limit= allows more", folder, limit)

    return hook


def replay(
    path: str | os.PathLike[str], *, name: str = "", device: torch.device | str = "cpu"
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Iterate over the recorded calls of a folder, for `model(*args, **kwargs)`.

    `name` selects the calls of a submodule; by default those of the model itself.
    """
    files = sorted(Path(path).glob(f"*{_SUFFIX}"))
    if not files:
        raise FileNotFoundError(f"there are no recorded calls in {path}")
    for file in files:
        call = _read(file, name, torch.device(device))
        if call is not None:
            yield call


def _read(file: Path, name: str, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Read the call in a file; None if it is a call of another module."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            structure = json.loads(str(arrays[_STRUCTURE]))
            if structure["name"] != name:
                return None
            reader = _Reader(arrays, device)
            return tuple(reader.value(structure["args"])), reader.value(structure["kwargs"])
    except Exception as error:  # a file that was edited can make numpy, zlib, JSON or torch raise anything
        raise SardonyxError(f"{file} cannot be read as a recorded call: {error}", hint="record it again") from error


def _write(folder: Path, call: Call) -> Path:
    """Write a call to a file with the first free number."""
    writer = _Writer()
    args, kwargs = writer.value(list(call.args), "args"), writer.value(dict(call.kwargs), "kwargs")
    structure = json.dumps({"name": call.name, "number": call.number, "args": args, "kwargs": kwargs})
    arrays: dict[str, Any] = {_STRUCTURE: np.array(structure), **writer.arrays}
    for number in itertools.count():
        path = folder / f"{number:06d}{_SUFFIX}"
        try:
            with path.open("xb") as file:
                np.savez(file, **arrays)
        except FileExistsError:
            continue  # it exists, or another process was faster
        return path
    raise AssertionError("unreachable")


# Values as JSON: lists and plain values as such, everything else as an object with one key, its type.

_NUMPY_DTYPES = {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool}
_NUMPY_DTYPES |= {torch.int8, torch.int16, torch.int32, torch.int64}
_NUMPY_DTYPES |= {torch.uint8, torch.uint16, torch.uint32, torch.uint64}
"""Dtypes that numpy supports; others are written as bytes."""


class _Writer:
    """Serializes values to JSON and their tensors to arrays; a tensor that occurs twice is written once."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[int, str] = {}

    def value(self, value: Any, where: str) -> Any:
        """Serialize a value; `where` is its path among the arguments, for errors."""
        kind = type(value)
        if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, where)}
        if kind is list:
            return [self.value(part, f"{where}[{index}]") for index, part in enumerate(value)]
        if kind in (tuple, torch.Size):
            return {kind.__name__: self.value(list(value), where)}
        if kind is dict:
            return {"dict": [[self.value(k, where), self.value(part, f"{where}[{k!r}]")] for k, part in value.items()]}
        if kind is float:
            return {"float": str(value)}
        if kind in (torch.dtype, torch.device):
            return {kind.__name__: str(value).removeprefix("torch.")}
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> Any:
        layers = _cache_layers(value)
        if layers is not None:
            return {"DynamicCache": self.value(layers, where)}
        name = pytree.SUPPORTED_SERIALIZED_TYPES[type(value)].serialized_type_name if _is_registered(value) else None
        if not isinstance(name, str):
            raise _cannot_record(value, where)
        parts, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        return {"node": [name, self.value(list(parts), where), self.value(context, where)]}

    def _tensor(self, tensor: torch.Tensor, where: str) -> dict[str, Any]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            raise _cannot_record(tensor, where)
        name = self._names.setdefault(id(tensor), str(len(self._names)))
        on_cpu = tensor.detach().cpu().resolve_conj().resolve_neg()
        flat = on_cpu.contiguous().reshape(-1)
        self.arrays[name] = (flat if tensor.dtype in _NUMPY_DTYPES else flat.view(torch.uint8)).numpy()
        return {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(on_cpu.shape),
            "stride": list(torch.empty_like(on_cpu).stride()),  # the tensor's own, unless its memory has gaps
            "grad": tensor.requires_grad,
        }


def _is_registered(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES and type(value) in pytree.SUPPORTED_SERIALIZED_TYPES


def _cannot_record(value: Any, where: str) -> SardonyxError:
    return SardonyxError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be recorded",
        hint="register a dataclass by torch.export.register_dataclass; "
        "otherwise leave the argument out, or record with your own hook",
    )


class _Reader:
    """Deserializes values from JSON and arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray], device: torch.device) -> None:
        self._arrays, self._device = arrays, device
        self._tensors: dict[str, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        """Deserialize a value."""
        if isinstance(value, list):
            return [self.value(part) for part in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            if content["name"] not in self._tensors:
                self._tensors[content["name"]] = self._tensor(**content)
            return self._tensors[content["name"]]
        if kind == "dict":
            return {self.value(key): self.value(part) for key, part in content}
        if kind == "node":
            node = pytree.SUPPORTED_NODES[_type(content[0])]
            return node.unflatten_fn(self.value(content[1]), self.value(content[2]))
        return _SIMPLE[kind](self.value(content))

    def _tensor(self, name: str, dtype: str, shape: list[int], stride: list[int], grad: bool) -> torch.Tensor:
        tensor = torch.from_numpy(self._arrays[name]).view(getattr(torch, dtype)).reshape(shape)
        strided = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=self._device)
        return strided.copy_(tensor).requires_grad_(grad)


def _type(name: str) -> Any:
    """Return a class by its registered name; nothing is imported because a file names it."""
    registered = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if registered is None:
        raise SardonyxError(
            f"an argument is a {name}, which is not registered",
            hint="import or register it as the recording program did",
        )
    return registered


# The cache of transformers' generate()


def _cache_layers(value: Any) -> list[Any] | None:
    """Return keys and values by layer, None for an uninitialized one; None if it is not a plain DynamicCache."""
    module = sys.modules.get("transformers.cache_utils")
    if module is None or type(value) is not module.DynamicCache or value.offloading:
        return None
    if any(type(layer) is not module.DynamicLayer for layer in value.layers):
        return None
    return [[layer.keys, layer.values] if layer.is_initialized else None for layer in value.layers]


def _rebuild_cache(layers: list[Any]) -> Any:
    try:
        from transformers import DynamicCache
    except ImportError as error:
        raise MissingDependency(
            "an argument is a DynamicCache of transformers, which is not installed", hint="pip install transformers"
        ) from error
    cache = DynamicCache()
    for index, layer in enumerate(layers):
        if layer is not None:
            cache.update(*layer, index)
    return cache


_SIMPLE: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "Size": torch.Size,
    "float": float,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "DynamicCache": _rebuild_cache,
}
