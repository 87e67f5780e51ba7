"""`sardonyx compare`: compare two ways of running a model value by value, and find where they diverge."""

from __future__ import annotations

from typing import Any

import click

from sardonyx.cli import _compare_generation
from sardonyx.cli._generation import GenerationRequest, Generator, generation_options
from sardonyx.cli._messages import example, print_result, show_status, table
from sardonyx.cli._parameters import FiniteRange, as_json, input_options, model_argument
from sardonyx.cli._source import Inputs, Source
from sardonyx.diagnose.comparison import Comparison, Nonfinite, Place, Row, compare, find_nonfinite
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.options import Options

_SHOWN = 20
_GENERATES = "--generate compares tokens; leave it out to compare values"
_WAY_HELP = "How to run it: torch, torch:float64, or an engine, as onnxruntime:optimize=none,level=none. Use twice."


def model_and_arguments(model: Source, inputs: Inputs) -> tuple[Any, Any, Any]:
    """Return the model, its arguments and its keyword arguments."""
    if model.kind == "onnx":
        onnx_model = model.model(Options.of())
        return onnx_model, (model.feeds(inputs, onnx_model),), {}
    call = model.example()
    if call is None or inputs:
        raise SardonyxError(
            f"{model.text} can only be called with its example arguments" + ("" if call else ", and it has none"),
            hint="let the factory return (module, args, kwargs); --inputs and --size are for ONNX files",
        )
    return model.module(), *call


@click.command(
    epilog=example(
        "sardonyx compare examples/models.py:bert",
        "sardonyx compare examples/models.py:bert --way torch:float64 --way openvino",
        "sardonyx compare model.onnx --way reference --way onnxruntime",
        "sardonyx compare model.onnx --nan",
        "sardonyx compare examples/models.py:llama --generate --way torch --way onnxruntime:precision=int8",
    )
)
@model_argument
@click.option("--way", "ways", multiple=True, metavar="WAY", help=_WAY_HELP)
@click.option("--by", type=click.Choice(["value", "module"]), default="value", show_default=True, help="What to list.")
@click.option("--all", "every", is_flag=True, help="List every value, not only where the error begins.")
@click.option("--nan", is_flag=True, help="Find the origin of NaN or Inf instead, in the first way.")
@click.option("--tolerance", type=FiniteRange(0), help="Tolerance, relative to the largest magnitude.")
@click.option(
    "--budget", type=click.IntRange(1), default=256, show_default=True, metavar="MB", help="Memory for values."
)
@generation_options
@input_options
@as_json
def command(
    model: Source,
    ways: tuple[str, ...],
    by: str,
    every: bool,
    nan: bool,
    tolerance: float | None,
    budget: int,
    generation: GenerationRequest | None,
    inputs: Inputs,
    as_json: bool,
) -> None:
    """Run a model in two ways and find where the error begins: operator, module and line.

    By default torch and onnxruntime; for an ONNX file, onnxruntime without and with rewrites. Exits with 1 if results
    differ, or if --nan finds something.

    With --generate, generate() of a transformers model, greedily: whether tokens are equal, else the first that
    differs, and the largest logits of both there.
    """
    if generation is not None:
        if nan or every or tolerance is not None:
            raise OptionError("--nan, --all and --tolerance cannot be used with --generate", hint=_GENERATES)
        differs = _compare_generation.compare(Generator(model, generation, inputs), ways, as_json)
        click.get_current_context().exit(int(differs))
    subject, args, kwargs = model_and_arguments(model, inputs)
    with show_status("exporting the model", as_json) as progress:
        if nan:
            way = ways[0] if ways else None
            nonfinite = find_nonfinite(subject, *args, way=way, budget=budget * 2**20, progress=progress, **kwargs)
        else:
            comparison = compare(
                subject,
                *args,
                ways=ways or None,
                tolerance=tolerance,
                budget=budget * 2**20,
                progress=progress,
                **kwargs,
            )
    if nan:
        _print_nonfinite(nonfinite, as_json)
        click.get_current_context().exit(int(bool(nonfinite)))
    rows = list(comparison.rows) if every else comparison.suspects[:_SHOWN]
    _print_comparison(comparison, comparison.modules() if by == "module" else rows, as_json)
    click.get_current_context().exit(int(comparison.differs))


def _print_comparison(comparison: Comparison, rows: list[Row], as_json: bool) -> None:
    cells = [
        (f"{row.error:.1e}", f"{row.before:.1e}", "begins" if row.jumps else "", *_place(row.place)) for row in rows
    ]
    headings = ("error", "before", "", "operator", "value", "module", "line")
    text = str(comparison)
    parts = [text.splitlines()[0], table(headings, cells, right=("error", "before"))] if cells else [text]
    print_result(comparison.as_dict(), as_json, *parts)


def _place(place: Place) -> tuple[str, str, str, str]:
    return place.operator, place.key, place.module, place.where


def _print_nonfinite(nonfinite: list[Nonfinite], as_json: bool) -> None:
    entries = [
        {"operator": x.place.operator, "value": x.place.key, "module": x.place.module, "line": x.place.where}
        | {"makes": x.kind, "has": str(x.stats), "reads": {name: str(h) for name, h in x.reads.items()}}
        for x in nonfinite
    ]
    print_result({"nonfinite": entries}, as_json, *(list(map(str, nonfinite)) or ["every value is a finite number"]))
