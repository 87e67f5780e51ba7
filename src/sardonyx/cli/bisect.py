"""`sardonyx bisect`: find the rule, kernel, optimizer or option that changes a model's result or time."""

from __future__ import annotations

from typing import Any, cast

import click

from sardonyx.cli._messages import example, print_result, show_status
from sardonyx.cli._parameters import FiniteRange, as_json, engine_options, input_options, model_argument
from sardonyx.cli._source import Inputs, Source
from sardonyx.cli.compare import model_and_arguments
from sardonyx.diagnose.bisection import bisect
from sardonyx.diagnose.bisection.setting import KINDS
from sardonyx.options import Options


@click.command(
    epilog=example(
        "sardonyx bisect examples/models.py:bert",
        "sardonyx bisect model.onnx --over rule --tolerance 1e-5",
        "sardonyx bisect model.onnx --by time --option native=true",
    )
)
@model_argument
@click.option("--over", multiple=True, type=click.Choice(KINDS), help="What to search; default: everything.")
@click.option("--by", type=click.Choice(["result", "time"]), default="result", show_default=True)
@click.option("--tolerance", type=FiniteRange(0), help="Tolerance, relative to the largest magnitude.")
@engine_options
@input_options
@as_json
def command(
    model: Source,
    over: tuple[str, ...],
    by: str,
    tolerance: float | None,
    options: Options,
    inputs: Inputs,
    as_json: bool,
) -> None:
    """Find what changes the result of a model between export and engine, by disabling it.

    Searches entries of options, ONNX Runtime's optimizers, native kernels (with --option native=true) and rewrite
    rules. Exits with 1 if it finds a culprit.
    """
    subject, args, kwargs = model_and_arguments(model, inputs)
    with show_status("exporting the model", as_json) as progress:
        result = bisect(
            subject,
            *args,
            options=options,
            over=cast(Any, over or KINDS),
            by=cast(Any, by),
            tolerance=tolerance,
            progress=progress,
            **kwargs,
        )
    print_result(result.as_dict(), as_json, str(result))
    click.get_current_context().exit(int(bool(result.culprits)))
