"""`sardonyx report`: write an HTML report of a compiled model."""

from __future__ import annotations

from pathlib import Path

import click
from rich.filesize import decimal

from sardonyx.cli._messages import example, print_result, show_status
from sardonyx.cli._output import OutputFile
from sardonyx.cli._parameters import as_json, engine_options, input_options, model_argument, precision_options
from sardonyx.cli._source import Inputs, Source
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
@precision_options
@as_json
def command(
    model: Source,
    output: Path,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Write one HTML file: the graph before and after, rules, fallbacks, times and errors by node.

    A module with example arguments is compiled as by torch.compile; an .onnx file, or a module with --inputs or --size,
    is rewritten and run as an ONNX model. The page needs no network.
    """
    chosen = Options.of(options, report=str(output))
    with show_status("compiling and measuring", as_json):
        report = _report(model, inputs, chosen)
        html.save(report, output, chosen, title=model.name)
    size = output.stat().st_size
    result = {"output": str(output), "bytes": size, "nodes": report.nodes, "fallbacks": len(report.fallbacks)}
    print_result(result, as_json, str(report), f"\n{output}  {decimal(size)}")


def _report(model: Source, inputs: Inputs, options: Options) -> Report:
    call = None if inputs else model.example()
    if call is not None:
        args, kwargs = call
        return explain(model.module(), *args, options=options, **kwargs)
    onnx_model = model.model(Options.of(options, report=None, native=False))
    program, feeds = model.as_file(onnx_model, inputs, options)
    html.report_program(program, list(feeds.values()), {})
    return program.report
