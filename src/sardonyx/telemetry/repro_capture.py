"""The option `repro` when torch.export fails: there is no graph, so the module and its arguments are written."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from sardonyx.errors import CaptureError
from sardonyx.options import Options
from sardonyx.telemetry import repro
from sardonyx.telemetry.repro import VALUES, Tensor
from sardonyx.telemetry.repro_source import CannotRebuild, Sources, is_user_module

CALL = "call.pkl"
_KIND = "uncaptured"


@contextmanager
def write_capture_repro_on_error(
    options: Options,
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    examples: Sequence[Any] = (),
) -> Iterator[None]:
    """While active, a module that cannot be captured is written as a repro, if the option `repro` is set."""
    try:
        yield
    except CaptureError as error:
        if options.repro:
            _write_repro(error, options, _ExportCall(args, kwargs, dynamic_shapes, examples, module))
        raise


@dataclass(frozen=True)
class _ExportCall:
    """The arguments of an export; `args` come first, so that their values are saved before those of weights."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any
    examples: Sequence[Any]
    module: torch.nn.Module


def _write_repro(error: CaptureError, options: Options, call: _ExportCall) -> None:
    assert options.repro
    try:
        with _disable_current_modes(), torch.no_grad():
            folder = repro.new_repro_folder(Path(options.repro), _KIND, error)
            command = _write(folder, error, options, call)
    except Exception as failure:
        repro.log_write_failure(error, failure)
        return
    repro.attach_repro(error, folder, command)


def _write(folder: Path, error: CaptureError, options: Options, call: _ExportCall) -> str:
    """Write a program, or a README if that is not possible; return the command or the README's path."""
    try:
        pickled, sources, tensors = _pickle_call(call)
    except Exception as failure:  # pickle may raise anything
        (folder / "README.md").write_text(_readme(error, call, failure), encoding="utf-8")
        return str(folder / "README.md")
    (folder / CALL).write_bytes(pickled)
    if tensors:
        torch.save(tensors, folder / VALUES)
    (folder / "repro.py").write_text(_program(error, options, sources), encoding="utf-8")
    return f"python {folder / 'repro.py'}"


def _program(error: CaptureError, options: Options, sources: Sources) -> str:
    chosen, left_out = repro.serializable_options(options)
    lines = [
        *repro.header_lines(error),
        *sources.future(),
        sources.text(),
        "",
        *repro.omitted_option_lines(left_out),
        'if __name__ == "__main__":',
        "    from sardonyx.diagnose.repro import capture_again",
        "",
        f"    capture_again(__file__, globals(), {chosen!r})",
        '    print("it did not fail")',
        "",
    ]
    return "\n".join(lines)


# Pickling a module and its arguments


def _pickle_call(call: _ExportCall) -> tuple[bytes, Sources, dict[str, torch.Tensor]]:
    file = BytesIO()
    pickler = _Pickler(file)
    pickler.dump(call)
    return file.getvalue(), pickler.sources, pickler.tensors.values


@dataclass
class _Tensors:
    """The tensors in a pickle, by number, and the values of those that fit in the limit."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes_left: int = field(default_factory=lambda: repro.MAX_VALUE_BYTES)
    _seen: dict[int, tuple[torch.Tensor, tuple[Any, ...]]] = field(default_factory=dict)
    """By `id`; the tensors are referenced, so that their ids are not reused."""

    def describe(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the metadata of a tensor, and save its values if they fit."""
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, self._add(tensor, len(self._seen))
        return self._seen[id(tensor)][1]

    def _add(self, tensor: torch.Tensor, number: int) -> tuple[Any, ...]:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout != torch.strided:
            raise CannotRebuild(f"it holds a {type(tensor).__name__} ({tensor.layout})")
        if not tensor.is_meta and tensor.nbytes <= self.bytes_left:
            self.bytes_left -= tensor.nbytes
            self.values[str(number)] = tensor.detach().clone()
        metadata = Tensor(tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))
        return "tensor", number, metadata, isinstance(tensor, torch.nn.Parameter), tensor.requires_grad


class _Pickler(pickle.Pickler):
    """Replaces tensors by their metadata, and the user's classes and functions by names in the source."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file)
        self.tensors, self.sources = _Tensors(), Sources()

    def persistent_id(self, obj: Any) -> Any:
        """Return what is written instead of an object; None to pickle it normally."""
        if isinstance(obj, torch.Tensor):
            return self.tensors.describe(obj)
        if isinstance(obj, (type, FunctionType)) and is_user_module(obj.__module__):
            return "source", self.sources.name_of(obj)
        return None


# The README if no program can be written


def _readme(error: CaptureError, call: _ExportCall, failure: Exception) -> str:
    """Return a description of the failure."""
    arguments = pytree.tree_map(_describe_value, {"args": list(call.args), "kwargs": dict(call.kwargs)})
    module = call.module
    return "\n".join(
        [
            f"# {type(error).__name__}: {error.what}",
            "",
            f"There is no program that reproduces this, because the module cannot be rebuilt from text: {failure}.",
            "`error.txt` has the full traceback, `versions.json` the versions of packages.",
            "",
            *_block("The call", "\n".join(f"{name} = {value}" for name, value in arguments.items())),
            *_block("Dynamic shapes", repr(call.dynamic_shapes or list(call.examples) or "nothing")),
            *_block("The module", str(module)),
            *_block("Its source", _source_of(module)),
        ]
    )


def _block(title: str, text: str) -> list[str]:
    return [f"## {title}", "", "```text", text.rstrip(), "```", ""]


def _describe_value(value: Any) -> Any:
    return f"{value.dtype} {tuple(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else value


def _source_of(module: torch.nn.Module) -> str:
    """Return the source of the module's class, or of the function that it calls."""
    target: Any = vars(module).get("forward", type(module))
    try:
        return inspect.getsource(target)
    except (OSError, TypeError) as error:
        return f"unknown: {error}"
