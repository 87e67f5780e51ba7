"""`sardonyx reduce`: the smallest part of a failing model that still fails, as a folder to send."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click

from sardonyx.cli._output import OutputFolder, atomic_folder
from sardonyx.cli._parameters import (
    FiniteRange,
    Source,
    as_json,
    example,
    input_options,
    model_argument,
    print_result,
    show_status,
)
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
@click.option(
    "-o", "--output", type=OutputFolder(over="reproduce.py"), required=True, help="The folder that is written."
)
@click.option("--fails", type=click.Choice(["wrong", "exception", "crash", "slow"]), help="By default what happens.")
@click.option("--command", "line", metavar="LINE", help="Fails with a status but 0; {model} and {inputs} are files.")
@click.option("--way", default="onnxruntime:optimize=none", show_default=True, help="How it is run.")
@click.option("--against", default="reference:optimize=none", show_default=True, help="What counts as right.")
@click.option("--tolerance", type=FiniteRange(0), help="What counts as wrong, of the largest magnitude.")
@click.option(
    "--minutes",
    type=FiniteRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="The best so far is kept after these, or at Ctrl-C.",
)
@click.option(
    "--limit",
    type=FiniteRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For one candidate.",
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
    inputs: Path | None,
    sizes: Mapping[str, int],
    seed: int,
    as_json: bool,
) -> None:
    """Cut a model that crashes, raises, is wrong or slow down to the smallest part that still does.

    Writes model.onnx, inputs.npz, and reproduce.py, which needs onnxruntime and numpy alone where the fault is theirs.
    Candidates run in processes of their own. Exits with 0 when it is written, with 3 where the model does not fail.
    """
    if line is not None and "{model}" not in line:
        raise click.BadParameter(f"--command is {line!r}, and does not say where {{model}} goes")
    given, args, kwargs = model_and_arguments(model, inputs, sizes, seed)
    with show_status("running the model", as_json) as progress:
        found = reduce(
            given,
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
        with atomic_folder(output) as beside:
            found.save(beside)
    print_result({"folder": str(output), **found.as_dict()}, as_json, str(found), f"{output}: python reproduce.py")
