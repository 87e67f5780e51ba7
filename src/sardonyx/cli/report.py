"""`sardonyx report`: what becomes of a model, as a page to look at."""

from __future__ import annotations

from pathlib import Path

import click
from rich.filesize import decimal

from sardonyx.cli._given import (
    Inputs,
    Source,
    as_json,
    engine_options,
    example,
    input_options,
    model_argument,
    tell,
    working,
)
from sardonyx.cli._output import OutputFile
from sardonyx.diagnose import html
from sardonyx.diagnose.explain import explain
from sardonyx.options import Options
from sardonyx.telemetry.report import Report


@click.command(
    epilog=example(
        "sardonyx report examples/models.py:bert -o bert.html",
        "sardonyx report model.onnx -o model.html --size batch=4",
    )
)
@model_argument
@click.option("-o", "--output", type=OutputFile(".html"), required=True, help="The .html file.")
@input_options
@engine_options
@as_json
def command(
    model: Source,
    output: Path,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Write one HTML file: the graph before and after, rules, fallbacks, times and errors by node.

    A module with arguments of its own is compiled as by torch.compile; an .onnx file, and a module with other inputs,
    is rewritten and run as a file. The page needs no network.
    """
    chosen = Options.of(options, report=str(output))
    with working("compiling and measuring", as_json):
        found = _report(model, inputs, chosen)
        html.save(found, output, chosen, title=model.name)
    size = output.stat().st_size
    told = {"output": str(output), "bytes": size, "nodes": found.nodes, "fallbacks": len(found.fallbacks)}
    tell(told, as_json, str(found), f"\n{output}  {decimal(size)}")


def _report(model: Source, inputs: Inputs, options: Options) -> Report:
    call = None if inputs else model.example()
    if call is not None:
        args, kwargs = call
        return explain(model.module(), *args, options=options, **kwargs)
    held = model.model(Options.of(options, report=None, native=False))
    program, given = model.as_file(held, inputs, options)
    html.tell_program(program, list(given.values()), {})
    return program.report
