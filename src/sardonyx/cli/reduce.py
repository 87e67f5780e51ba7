"""`sardonyx reduce`: reduce a failing model to the smallest part that still fails, with a program to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from sardonyx.cli._messages import example, print_result, show_status
from sardonyx.cli._output import OutputFolder, atomic_folder
from sardonyx.cli._parameters import FiniteRange, as_json, input_options, model_argument
from sardonyx.cli._source import Inputs, Source
from sardonyx.cli.compare import model_and_arguments
from sardonyx.diagnose.reduction import reduce


@click.command(
    epilog=example(
        "sardonyx reduce model.onnx -o smaller",
        "sardonyx reduce model.onnx -o smaller --fails wrong --against reference --tolerance 1e-3",
        "sardonyx reduce examples/models.py:bert -o smaller --against torch",
        "sardonyx reduce model.onnx -o smaller --command 'python check.py {model} {inputs}'",
    )
)
@model_argument
@click.option("-o", "--output", type=OutputFolder(over="reproduce.py"), required=True, help="The folder to write.")
@click.option(
    "--fails",
    type=click.Choice(["wrong", "exception", "crash", "slow"]),
    help="How the model fails; default: found out by running it.",
)
@click.option(
    "--command",
    "line",
    metavar="LINE",
    help="A command that exits with a status other than 0 if {model} with {inputs} fails.",
)
@click.option("--way", default="onnxruntime:optimize=none", show_default=True, help="How to run it.")
@click.option("--against", default="reference:optimize=none", show_default=True, help="The reference.")
@click.option("--tolerance", type=FiniteRange(0), help="Tolerance, relative to the largest magnitude.")
@click.option(
    "--minutes",
    type=FiniteRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="Time limit; then, or at Ctrl-C, the best result so far is written.",
)
@click.option(
    "--limit",
    type=FiniteRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of one candidate.",
)
@input_options
@as_json
def command(
    model: Source,
    output: Path,
    fails: str | None,
    line: str | None,
    way: str,
    against: str,
    tolerance: float | None,
    minutes: float,
    limit: float,
    inputs: Inputs,
    as_json: bool,
) -> None:
    """Reduce a model that crashes, raises, is wrong or slow to the smallest part that still fails.

    Writes model.onnx, inputs.npz, and reproduce.py, which needs only onnxruntime and numpy unless sardonyx is involved.
    Each candidate runs in its own process. Exits with 0 on success, with 3 if the model does not fail.
    """
    if line is not None and "{model}" not in line:
        raise click.BadParameter(f"--command is {line!r}, which does not contain {{model}}")
    subject, args, kwargs = model_and_arguments(model, inputs)
    with show_status("running the model", as_json) as progress:
        result = reduce(
            subject,
            *args,
            fails=cast(Any, fails),
            command=line,
            way=way,
            against=against,
            tolerance=tolerance,
            minutes=minutes,
            limit=limit,
            progress=progress,
            **kwargs,
        )
        with atomic_folder(output) as temporary:
            result.save(temporary)
    print_result({"folder": str(output), **result.as_dict()}, as_json, str(result), f"{output}: python reproduce.py")
