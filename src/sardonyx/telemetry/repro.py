"""The option `repro`: write a failure to a folder, with a program that reproduces it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from sardonyx.errors import SardonyxError
from sardonyx.options import Options
from sardonyx.telemetry.repro_code import class_source, constants, custom_operators
from sardonyx.versions import versions

log = logging.getLogger(__name__)

Door: TypeAlias = Literal["graph", "dynamo", "export"]
VALUES = "values.pt"
MAX_VALUE_BYTES = 2**24
"""Bytes of a call's tensors up to which their values are saved."""


@dataclass(frozen=True)
class Tensor:
    """The metadata of a tensor that is an input of a graph."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    dynamic: tuple[int, ...] = ()
    """Dimensions with symbolic sizes."""

    def make(self, seed: int) -> torch.Tensor:
        """Create such a tensor: normally distributed floats from a seed, zeros for integers, true for booleans."""
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            tensor.copy_(torch.randn(self.shape, generator=generator, dtype=_random_dtype(self.dtype)))
        else:
            tensor.fill_(self.dtype == torch.bool)  # integers may be indices: zero is always valid
        return tensor.to(self.device)


def _random_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that `torch.randn` supports."""
    return dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32


# Writing


@contextmanager
def write_repro_on_error(
    options: Options,
    graph: torch.fx.GraphModule,
    args: Callable[[], Sequence[Any]] | None = None,
    *,
    door: Door = "graph",
    kind: str = "inference",
    weights: frozenset[int] = frozenset(),
) -> Iterator[None]:
    """While active, an error is written as a repro of the graph, if the option `repro` is set.

    `args` returns the arguments of the graph; without it, the metadata of its placeholders is used.
    """
    try:
        yield
    except Exception as error:
        write_repro(error, options, graph, args() if args else None, door=door, kind=kind, weights=weights)
        raise


def write_repro(
    error: Exception,
    options: Options,
    graph: torch.fx.GraphModule,
    args: Sequence[Any] | None,
    *,
    door: Door = "graph",
    kind: str = "inference",
    weights: frozenset[int] = frozenset(),
) -> None:
    """Write a repro of an error, if the option `repro` is set, and add it to the message; failures are logged."""
    if not options.repro or getattr(error, "repro", None):
        return
    try:
        with _disable_current_modes(), torch.no_grad():
            folder = _write(Path(options.repro), error, options, graph, args, door, kind, weights)
    except Exception as failure:
        log_write_failure(error, failure)
        return
    attach_repro(error, folder, f"python {folder / 'repro.py'}")


def log_write_failure(error: Exception, failure: Exception) -> None:
    """Log that no repro could be written."""
    log.warning("no repro could be written for %s: %s", type(error).__name__, failure, exc_info=failure)


def attach_repro(error: Exception, folder: Path, command: str) -> None:
    """Add the folder and the command of a repro to an error."""
    error.repro = folder  # type: ignore[attr-defined]  # so that outer handlers do not write another
    line = f"repro: {command}"
    if isinstance(error, SardonyxError):
        error.args = (f"{error}\n  {line}",)
    else:
        error.add_note(line)
    log.warning("%s; %s", type(error).__name__, line)


def _write(
    parent: Path,
    error: Exception,
    options: Options,
    graph: torch.fx.GraphModule,
    args: Sequence[Any] | None,
    door: Door,
    kind: str,
    weights: frozenset[int],
) -> Path:
    placeholders = graph.graph.find_nodes(op="placeholder")
    known = [_describe_argument(node, args[i] if args is not None else None) for i, node in enumerate(placeholders)]
    values = _small_real_tensors(args) | constants(graph)
    chosen, left_out = serializable_options(options)
    folder = new_repro_folder(parent, kind, error)
    if values:
        torch.save(values, folder / VALUES)
    names, how = [node.name for node in placeholders], f"door={door!r}, kind={kind!r}, weights={sorted(weights)}"
    (folder / "repro.py").write_text(_program(error, graph, names, known, how, chosen, left_out), encoding="utf-8")
    return folder


def new_repro_folder(parent: Path, kind: str, error: Exception) -> Path:
    """Create a folder with the error's traceback and the versions of packages."""
    folder = _next_folder(parent, kind)
    (folder / "error.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
    return folder


def _next_folder(parent: Path, kind: str) -> Path:
    for number in itertools.count():
        folder = parent.absolute() / f"{number:03d}_{kind}"
        if any(parent.glob(f"{number:03d}_*")):
            continue
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue  # another process was faster
        return folder
    raise AssertionError("unreachable")


def _describe_argument(node: torch.fx.Node, value: Any) -> Tensor | int | float | None:
    """Return the metadata of an argument, from its value or from the placeholder's metadata."""
    expected = node.meta.get("val", node.meta.get("example_value"))
    value = expected if value is None else value
    if isinstance(value, torch.Tensor):
        traced = expected if isinstance(expected, torch.Tensor) else value
        dynamic = tuple(i for i, size in enumerate(traced.shape) if isinstance(size, torch.SymInt))
        sizes, strides = (tuple(map(_hint, dims)) for dims in (value.shape, value.stride()))
        return Tensor(sizes, strides, value.dtype, str(value.device), dynamic)
    if isinstance(value, (torch.SymInt, int)):
        return _hint(value)
    return float(value) if isinstance(value, (float, torch.SymFloat)) else None


def _hint(size: int | torch.SymInt) -> int:
    """Return a size as a number; for a symbol, the value that it was traced with."""
    if isinstance(size, int):
        return size
    return int(size.node.hint if size.node.has_hint() else 2)


def _small_real_tensors(args: Sequence[Any] | None) -> dict[str, torch.Tensor]:
    """Return the tensors of a call, if they have values and are small enough to be saved."""
    tensors = {str(i): x.detach() for i, x in enumerate(args or ()) if isinstance(x, torch.Tensor)}
    real = not any(isinstance(x, FakeTensor) or x.is_meta for x in tensors.values())
    return tensors if real and sum(x.nbytes for x in tensors.values()) <= MAX_VALUE_BYTES else {}


def serializable_options(options: Options) -> tuple[dict[str, Any], list[str]]:
    """Return the options that differ from the defaults, and the names of those that cannot be written as text."""
    different = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    different = {name: x for name, x in different.items() if x != getattr(Options(), name)}
    ignored = {"repro", "report", "dump", "cache_dir", "cache_bytes"}
    plain = {name: x for name, x in different.items() if _is_plain(x) and name not in ignored}
    return plain, [name for name in different if name not in plain and name not in ignored]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(x) for pair in value.items() for x in pair)
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))


def _program(
    error: Exception,
    graph: torch.fx.GraphModule,
    names: Sequence[str],
    known: Sequence[Any],
    how: str,
    options: Mapping[str, Any],
    left_out: Sequence[str],
) -> str:
    imports, classes = class_source(graph)
    needed = custom_operators(graph)
    lines = [
        *header_lines(error),
        "from pathlib import Path",
        "",
        imports.strip(),
        "",
        "from sardonyx.diagnose.repro import Tensor, reproduce, values_in",
        "",
        *omitted_option_lines(left_out),
        *(f"# The operator {name} must be registered first." for name in needed),
        "VALUES = values_in(Path(__file__).parent)",
        "",
        "",
        classes.strip(),
        "",
        "",
        "INPUTS = [",
        *(f"    {_literal(x)},  # {name}" for name, x in zip(names, known, strict=True)),
        "]",
        "",
        f"OPTIONS = {dict(options)!r}",
        "",
        'if __name__ == "__main__":',
        f"    reproduce(Graph(), INPUTS, VALUES, OPTIONS, {how})",
        '    print("it did not fail")',
        "",
    ]
    return "\n".join(lines)


def header_lines(error: Exception) -> list[str]:
    """Return the docstring of a repro program: the error."""
    first = str(error).splitlines()[0] if str(error) else ""
    return [
        '"""' + f"{type(error).__name__}: {first}".replace("\\", "\\\\").replace('"""', "'''"),
        "",
        "error.txt has the full traceback, versions.json the versions of packages.",
        '"""',
        "",
    ]


def omitted_option_lines(left_out: Sequence[str]) -> list[str]:
    """Return comments that name the options which could not be written."""
    return [f"# Omitted, because it cannot be written as text: the option {name!r}." for name in left_out]


def _literal(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    arguments = f"{value.shape}, {value.strides}, {value.dtype}"
    arguments += f", device={value.device!r}" if value.device != "cpu" else ""
    return f"Tensor({arguments}" + (f", dynamic={value.dynamic})" if value.dynamic else ")")
