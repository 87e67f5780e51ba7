"""Short text for values: tensors by dtype, shape, device and range, containers by their items, durations by unit."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import islice
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

Children: TypeAlias = Iterator[tuple[str, Any]]

_MAX_SAMPLED = 2**20
"""Elements of a tensor that are read; larger tensors are sampled."""
_MAX_ELEMENTS = 8
"""Elements of a tensor that are shown: all of a smaller one, the first of a larger integer tensor."""
_MAX_ENTRIES = 16
"""Entries of a container that are shown."""
_DEPTH = 6
_MAX_NODES = 2000
"""Values visited in one argument at most."""


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(0.0000123), duration(0.0123), duration(1.23)
    ('12.3 µs', '12.3 ms', '1.23 s')
    """
    scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "µs"))
    return f"{seconds / scale:.3g} {unit}"


def summarize(name: str, value: Any) -> list[str]:
    """Return the lines for a named value, with its tensors indented below.

    >>> print("\\n".join(summarize("x", {"mask": torch.ones(2, 3), "scale": 0.5})))
    x: dict
      ['mask']: float32[2, 3] cpu, 1 to 1, mean 1: [[1, 1, 1], [1, 1, 1]]
      ['scale']: 0.5
    """
    return _Summarizer().summarize(name, value, ())[0]


def summarize_tensor(tensor: torch.Tensor) -> str:
    """Return dtype, shape, device and range; all values of a small tensor, the first values of an integer one.

    >>> summarize_tensor(torch.tensor([1.0, 3.0, float("nan")]))
    'float32[3] cpu, 1 to 3, mean 2, 1 NaN: [1, 3, nan]'
    >>> summarize_tensor(torch.arange(100, 120))
    'int64[20] cpu, 100 to 119, mean 109.5: 100, 101, 102, 103, 104, 105, 106, 107, …'
    """
    parts = [f"{_dtype_and_shape(tensor)} {tensor.device}"]
    if tensor.requires_grad:
        parts.append("requires grad")
    return ", ".join([*parts, *_value_range(tensor)]) + _shown_elements(tensor)


class _Summarizer:
    """Summarizes a value in bounded time, however large, deep or circular it is."""

    def __init__(self) -> None:
        self._left = _MAX_NODES

    def summarize(self, name: str, value: Any, around: tuple[int, ...]) -> tuple[list[str], bool]:
        """Return the lines for a value, and whether it holds tensors; a value without any takes one line."""
        self._left -= 1
        if isinstance(value, torch.Tensor):
            return [f"{name}: {summarize_tensor(value)}"], True
        known = id(value) in around or len(around) >= _DEPTH or self._left < 0
        entries = None if known else _children(value)
        below, has_tensors = [], False
        for label, child in islice(entries or (), _MAX_ENTRIES):
            lines, child_has_tensors = self.summarize(label, child, (*around, id(value)))
            has_tensors |= child_has_tensors
            if child_has_tensors or _is_container(value):
                below += [f"  {line}" for line in lines]
        if not has_tensors:
            return [f"{name}: {_short.repr(value)}"], False
        left_out = sum(1 for _ in entries or ())
        below += [f"  … {left_out} more"] if left_out else []
        return [f"{name}: {type(value).__name__}", *below], True


def _is_container(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple, set, frozenset)) or dataclasses.is_dataclass(value)


def _children(value: Any) -> Children | None:
    """Return an iterator over the items or attributes of a value with their labels; None if it has none."""
    if isinstance(value, Mapping):
        return ((f"[{_short.repr(key)}]", child) for key, child in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ((f".{name}", child) for name, child in zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple, set, frozenset)):
        return ((f"[{index}]", child) for index, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return ((f".{f.name}", getattr(value, f.name)) for f in fields if hasattr(value, f.name))
    if isinstance(value, (type, torch.nn.Module)) or callable(value) or not hasattr(value, "__dict__"):
        return None
    # Plain attributes of other objects are skipped: many settings must not hide the tensors.
    return ((f".{name}", child) for name, child in vars(value).items() if not isinstance(child, _PLAIN))


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)


class _Short(reprlib.Repr):
    """A short repr; for unknown objects the class name, because their own repr can be of any length."""

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return _dtype_and_shape(x)
        if isinstance(x, (*_PLAIN, torch.Size, Enum, range, slice, torch.layout, torch.memory_format)):
            text = repr(x)
            return text if len(text) <= self.maxother else text[: self.maxother - 1] + "…"
        if hasattr(x, "dtype") and hasattr(x, "shape"):
            return f"{type(x).__name__} {x.dtype}{list(x.shape)}"
        return f"<{type(x).__name__}>"


_short = _Short()
_short.maxstring = _short.maxother = 80
_short.maxdict = _short.maxlist = _short.maxtuple = _short.maxset = 6


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    sizes = "[…]" if tensor.is_nested else str(list(tensor.shape))
    return ("" if plain else f"{type(tensor).__name__} ") + name + sizes


def _value_range(tensor: torch.Tensor) -> list[str]:
    reason = _unreadable(tensor)
    if reason:
        return [reason]
    if not tensor.numel():
        return ["empty"]
    with torch.no_grad(), _disable_current_modes():
        sample = _sample(tensor.detach())
        parts = _format_range(sample)
    if sample.numel() < tensor.numel():
        parts.append(f"{sample.numel()} elements sampled")
    return parts


def _shown_elements(tensor: torch.Tensor) -> str:
    """Format all values of a small tensor; the first values of a large integer tensor, such as token ids."""
    if _unreadable(tensor) or not tensor.numel():
        return ""
    with torch.no_grad(), _disable_current_modes():
        values = tensor.detach()
        if values.numel() <= _MAX_ELEMENTS:
            return f": {_format_nested(_widen(values).tolist())}"
        if values.dtype == torch.bool or values.dtype.is_floating_point or values.is_complex():
            return ""
        row = values[(0,) * (values.dim() - 1)]
        return f": {', '.join(map(str, row[:_MAX_ELEMENTS].tolist()))}, …"


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a dtype that `tolist` supports."""
    if tensor.is_complex():
        return tensor.resolve_conj().to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _format_nested(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_nested, value))}]"
    return f"{value:.4g}" if isinstance(value, (float, complex)) else str(value)


def _unreadable(tensor: torch.Tensor) -> str | None:
    """Return why the values of a tensor cannot be read; None if they can."""
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return "without values"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside a transform"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return "values not strided"
    if is_traceable_wrapper_subclass(tensor):
        return "values in parts"  # as of a sharded tensor: reading them may need communication
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return None


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a strided view of it along its longest axes."""
    while tensor.numel() > _MAX_SAMPLED:
        axis = max(range(tensor.dim()), key=tensor.size)
        step = min(-(-tensor.numel() // _MAX_SAMPLED), tensor.size(axis))
        tensor = tensor[(slice(None),) * axis + (slice(None, None, step),)]
    return tensor


_COMPARABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _format_range(tensor: torch.Tensor) -> list[str]:
    if tensor.dtype == torch.bool:
        return [f"{int(tensor.sum())} true"]
    if tensor.is_complex():
        size, *rest = _format_range(torch.view_as_real(tensor.resolve_conj()).double().norm(dim=-1))
        return [f"magnitude {size}", *rest]
    if not tensor.dtype.is_floating_point and tensor.dtype != torch.uint64:
        integers = tensor.long()
        return [f"{int(integers.min())} to {int(integers.max())}", f"mean {integers.double().mean().item():.4g}"]
    if tensor.dtype in _COMPARABLE:
        low, high = (x.item() for x in tensor.aminmax())  # NaN if there is one
        if isfinite(low) and isfinite(high):
            return [f"{low:.4g} to {high:.4g}", f"mean {tensor.mean(dtype=torch.float64).item():.4g}"]
    wide = tensor.double()
    finite = wide[wide.isfinite()]
    parts = [f"{finite.min().item():.4g} to {finite.max().item():.4g}"] if finite.numel() else ["none finite"]
    parts += [f"mean {finite.mean().item():.4g}"] if finite.numel() else []
    counts = {"NaN": int(wide.isnan().sum()), "Inf": int(wide.isinf().sum())}
    return parts + [f"{count} {name}" for name, count in counts.items() if count]
