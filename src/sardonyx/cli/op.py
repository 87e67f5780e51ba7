"""`sardonyx op`: create, build, test and pack projects of custom operators."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from sardonyx.cli._messages import example, print_result, table
from sardonyx.cli._output import OutputFolder
from sardonyx.cli._parameters import as_json
from sardonyx.customop import pack as packing
from sardonyx.customop import project
from sardonyx.customop.declaration import CustomOp
from sardonyx.customop.op_check import CheckResult, Status, check_project

path_argument = click.argument("path", default=".")


@click.group(
    epilog=example(
        "sardonyx op new GroupNorm",
        "cd group_norm",
        "sardonyx op build",
        "sardonyx op test",
        "sardonyx op pack --output dist --wheel",
    )
)
def command() -> None:
    """Write, build, test and pack custom operators.

    PATH is a project's folder, a .py file or a module name; by default the working directory.
    """


@command.command(epilog=example("sardonyx op new GroupNorm --domain mydomain"))
@click.argument("name")
@click.option("--domain", help="The operator's domain in ONNX and namespace in torch; default: the project's name.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Folder to write; default: a new folder with the project's name."
)
@as_json
def new(name: str, domain: str | None, folder: Path | None, as_json: bool) -> None:
    """Create a small project for an operator.

    It has a declaration, a kernel, a test and a README, works as it is, and is meant to be edited. Nothing is
    overwritten.
    """
    files = [str(path) for path in project.create(name, domain=domain, folder=folder)]
    print_result({"files": files}, as_json, *files)


@command.command(epilog=example("sardonyx op build", "sardonyx op build my_operators.py"))
@path_argument
@as_json
def build(path: str, as_json: bool) -> None:
    """Compile the kernels.

    Prints the libraries and the types they support. A mistake in a kernel is shown at its line.
    """
    built = [_describe(op) for op in project.load(path).operators]
    print_result(built, as_json, *[line for entry in built for line in _build_lines(entry)])


def _build_lines(entry: Mapping[str, Any]) -> list[str]:
    library = f"{entry['library']}  {decimal(entry['bytes'])}" if entry["library"] else "needs no library"
    return [f"{entry['operator']}  {'; '.join(entry['types'])}", f"  {library}"]


def _describe(op: CustomOp) -> dict[str, Any]:
    types = [", ".join(chosen.values()) for chosen in op.signature.choices]
    library = op.library if op.has_kernels else None
    return {
        "operator": op.signature.qualified,
        "domain": op.domain,
        "types": [name for name in types if name],
        "library": library and str(library),
        "bytes": library.stat().st_size if library else 0,
    }


@command.command(epilog=example("sardonyx op test", "sardonyx op test my_operators.py --json"))
@path_argument
@as_json
@click.pass_context
def test(ctx: click.Context, path: str, as_json: bool) -> None:
    """Compare torch, ONNX Runtime and a reference.

    Runs every type, and checks gradients, other sizes, strides, and torch's rules for operators.

    \b
    Functions of the module define what to run, and what to compare with:
      examples()          a list of calls: [((x, weight), {"groups": 2})]
      reference(...)      takes the operator's arguments, floating-point tensors in double precision
    If a module has several operators, append their names: examples_group_norm, reference_group_norm.
    Without examples, inputs are random, from the signature.
    """
    outcomes = list(check_project(project.load(path)))
    parts: list[RenderableType] = []
    for operator, group in itertools.groupby(outcomes, lambda outcome: outcome.operator):
        parts += [operator, _table(group), ""]
    print_result([asdict(outcome) for outcome in outcomes], as_json, *parts, _count_results(outcomes))
    ctx.exit(int(any(outcome.result == "failed" for outcome in outcomes)))


_COLOURS: Mapping[Status, str] = {"passed": "green", "failed": "red", "skipped": "yellow"}


def _table(outcomes: Iterable[CheckResult]) -> Table:
    rows = [(x.check, x.example or "", x.types, Text(x.result, _COLOURS[x.result]), x.detail) for x in outcomes]
    return table(["check", "example", "types", "result", ""], rows)


def _count_results(outcomes: Sequence[CheckResult]) -> str:
    counts = Counter(outcome.result for outcome in outcomes)
    return ", ".join(f"{counts[word]} {word}" for word in _COLOURS if counts[word])


@command.command(
    epilog=example(
        "sardonyx op pack --output dist --wheel",
        "pip install dist/*.whl",
        """python -c 'import group_norm_ort; group_norm_ort.session("model.onnx")'""",
    )
)
@path_argument
@click.option("--output", type=OutputFolder(), required=True, help="The folder to write to.")
@click.option("--wheel", is_flag=True, help="Build a wheel too.")
@click.option("--march", help="Target processors, as in compilers; default: x86-64-v3 on x86-64.")
@as_json
def pack(path: str, output: Path, wheel: bool, march: str | None, as_json: bool) -> None:
    """Pack the operators for use with onnxruntime only.

    They run on machines with onnxruntime and numpy, without torch or sardonyx.

    The result is an importable folder: the library, manifest.json, and a few lines of Python. With --wheel a wheel is
    built too. On processors that lack the instructions of --march, importing it is an error.
    """
    loaded = project.load(path)
    for op in loaded.operators:
        if not op.has_kernels:
            click.echo(f"{op.signature.qualified} is written into models as ONNX nodes, and needs no library", err=True)
        elif op.operator_source.cuda is not None:
            click.echo(f"{op.signature.qualified} is packed for the CPU, without its CUDA kernel", err=True)
    packed = packing.pack(loaded, output, march=march)
    written = {"folder": str(packed)} | ({"wheel": str(packing.wheel(packed))} if wheel else {})
    print_result(written, as_json, *written.values())
