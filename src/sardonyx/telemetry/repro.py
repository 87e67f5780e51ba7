"""The option `repro`: what failed, as a folder with a program that fails in the same way."""

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
"""Bytes of a call's tensors up to which their values are kept."""


@dataclass(frozen=True)
class Tensor:
    """What is known of a tensor that a graph is given."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str = "cpu"
    dynamic: tuple[int, ...] = ()
    """Dimensions whose sizes are not fixed."""

    def make(self, seed: int) -> torch.Tensor:
        """A tensor like it: normal numbers from a seed, integers that are zero, as indices may have to be, all true."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        draw = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            made.copy_(torch.randn(self.shape, generator=draw, dtype=_random_dtype(self.dtype)))
        else:
            made.fill_(self.dtype == torch.bool)
        return made.to(self.device)


def _random_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that random numbers can be drawn in."""
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
    """While active, an error is written down with the graph it is about, if the options say where.

    `args` gives what the graph is called with; without it, what torch knows of its placeholders is taken.
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
    """Write an error down, if the options say where, and let its message say so. Its own failure is logged, no more."""
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
    """Log that an error could not be written down."""
    log.warning("no repro could be written for %s: %s", type(error).__name__, failure, exc_info=failure)


def attach_repro(error: Exception, folder: Path, what: str) -> None:
    """Let an error say what was written for it."""
    error.repro = folder  # type: ignore[attr-defined]  # so that who is further out does not write another
    told = f"repro: {what}"
    if isinstance(error, SardonyxError):
        error.args = (f"{error}\n  {told}",)
    else:
        error.add_note(told)
    log.warning("%s; %s", type(error).__name__, told)


def _write(
    place: Path,
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
    folder = new_repro_folder(place, kind, error)
    if values:
        torch.save(values, folder / VALUES)
    names, how = [node.name for node in placeholders], f"door={door!r}, kind={kind!r}, weights={sorted(weights)}"
    (folder / "repro.py").write_text(_program(error, graph, names, known, how, chosen, left_out), encoding="utf-8")
    return folder


def new_repro_folder(place: Path, kind: str, error: Exception) -> Path:
    """A new folder with what is written of any error: what it says, and the versions it happened with."""
    folder = _next_folder(place, kind)
    (folder / "error.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")
    return folder


def _next_folder(place: Path, kind: str) -> Path:
    for number in itertools.count():
        folder = place.absolute() / f"{number:03d}_{kind}"
        if any(place.glob(f"{number:03d}_*")):
            continue
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue  # another process was faster
        return folder
    raise AssertionError("unreachable")


def _describe_argument(node: torch.fx.Node, value: Any) -> Tensor | int | float | None:
    """What a program has to know of an argument: of the value that is given, or of the one that torch expects."""
    expected = node.meta.get("val", node.meta.get("example_value"))
    value = expected if value is None else value
    if isinstance(value, torch.Tensor):
        of = expected if isinstance(expected, torch.Tensor) else value
        dynamic = tuple(i for i, size in enumerate(of.shape) if isinstance(size, torch.SymInt))
        sizes, strides = (tuple(map(_hint, of)) for of in (value.shape, value.stride()))
        return Tensor(sizes, strides, value.dtype, str(value.device), dynamic)
    if isinstance(value, (torch.SymInt, int)):
        return _hint(value)
    return float(value) if isinstance(value, (float, torch.SymFloat)) else None


def _hint(size: int | torch.SymInt) -> int:
    """A size as a number: of a symbol, the one that it was traced with."""
    if isinstance(size, int):
        return size
    return int(size.node.hint if size.node.has_hint() else 2)


def _small_real_tensors(args: Sequence[Any] | None) -> dict[str, torch.Tensor]:
    """The tensors of a call, where they are real and small enough to be kept."""
    given = {str(i): x.detach() for i, x in enumerate(args or ()) if isinstance(x, torch.Tensor)}
    real = not any(isinstance(x, FakeTensor) or x.is_meta for x in given.values())
    return given if real and sum(x.nbytes for x in given.values()) <= MAX_VALUE_BYTES else {}


def serializable_options(options: Options) -> tuple[dict[str, Any], list[str]]:
    """The options that were chosen, and the names of those that cannot be written as text."""
    different = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    different = {name: x for name, x in different.items() if x != getattr(Options(), name)}
    aside = {"repro", "report", "dump", "cache_dir", "cache_bytes"}
    plain = {name: x for name, x in different.items() if _is_plain(x) and name not in aside}
    return plain, [name for name in different if name not in plain and name not in aside]


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
        *(f"# Has to be registered before: the operator {name}." for name in needed),
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
    """What a program begins with: the error that it is about."""
    first = str(error).splitlines()[0] if str(error) else ""
    return [
        '"""' + f"{type(error).__name__}: {first}".replace("\\", "\\\\").replace('"""', "'''"),
        "",
        "error.txt has the whole message, versions.json the versions it happened with.",
        '"""',
        "",
    ]


def omitted_option_lines(left_out: Sequence[str]) -> list[str]:
    """Which options a program lacks."""
    return [f"# Not written here, for it is no text: the option {name!r}." for name in left_out]


def _literal(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    told = f"{value.shape}, {value.strides}, {value.dtype}"
    told += f", device={value.device!r}" if value.device != "cpu" else ""
    return f"Tensor({told}" + (f", dynamic={value.dynamic})" if value.dynamic else ")")
