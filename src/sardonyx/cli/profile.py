"""`sardonyx profile`: show where the time of a call goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

from sardonyx.cli._messages import example, print_result, show_status
from sardonyx.cli._output import OutputFile
from sardonyx.cli._parameters import as_json, engine_options, input_options, model_argument, precision_options
from sardonyx.cli._source import Inputs, Source
from sardonyx.diagnose.profiling import Profile, profile
from sardonyx.options import Options


@click.command(
    epilog=example(
        "sardonyx profile examples/models.py:bert",
        "sardonyx profile model.onnx --size batch=4 --calls 50 --trace trace.json",
    )
)
@model_argument
@click.option("--calls", type=click.IntRange(1), default=10, show_default=True, help="Number of measured calls.")
@click.option("--trace", type=OutputFile(), help="Write onnxruntime's trace, for chrome://tracing.")
@input_options
@engine_options
@precision_options
@as_json
def command(
    model: Source,
    calls: int,
    trace: Path | None,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Show where the time of a call goes: by module, operator and source line, and outside kernels.

    A module with example arguments is compiled as by torch.compile; an .onnx file, or a module with --inputs or --size,
    runs as an ONNX model.
    """
    with show_status("profiling", as_json):
        result = _profile(model, inputs, options, calls=calls, trace=trace)
    print_result(result.as_dict(), as_json, str(result), *([f"\n{trace} written"] if trace else []))


def _profile(model: Source, inputs: Inputs, options: Options, **settings: Any) -> Profile:
    call = None if inputs else model.example()
    if call is not None:
        args, kwargs = call
        return profile(model.module(), *args, options=options, **settings, **kwargs)
    onnx_model = model.model(Options.of(options, native=False))
    program, feeds = model.as_file(onnx_model, inputs, options, optimize="none")
    with torch.no_grad():
        return profile(program, *feeds.values(), **settings)
