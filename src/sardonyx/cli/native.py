"""`sardonyx native`: compile parts of a model to a library that a stock onnxruntime loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.filesize import decimal

from sardonyx import native
from sardonyx.cli._feeds import read_inputs
from sardonyx.cli._messages import example, print_result, show_status
from sardonyx.cli._output import OutputFolder
from sardonyx.cli._parameters import as_json, calibration_option, model_argument, precision_options
from sardonyx.cli._source import Source, option_keywords
from sardonyx.doors.optimize import optimize
from sardonyx.errors import OptionError
from sardonyx.native.select import Choice
from sardonyx.options import Options


@click.group(epilog=example("sardonyx native compile model.onnx -o compiled", "sardonyx native show compiled"))
def command() -> None:
    """Compile parts of an ONNX model to native code."""


@command.command(
    "compile",
    epilog=example(
        "sardonyx native compile model.onnx -o compiled --measure",
        "sardonyx native compile model.onnx -o compiled --select scope:encoder.layer.0",
        "sardonyx native compile model.onnx -o compiled --inputs x,mask --outputs y",
    ),
)
@model_argument
@click.option("-o", "--output", type=OutputFolder(over="manifest.json"), required=True, help="The folder to write.")
@click.option(
    "--select",
    default="auto",
    show_default=True,
    metavar="WHAT",
    help="auto, all, scope:MODULE, or comma-separated names of nodes.",
)
@click.option("--inputs", help="Comma-separated values at which a region begins; with --outputs.")
@click.option("--outputs", help="Values at which it ends.")
@click.option("--measure", is_flag=True, help="Time each kernel against ONNX Runtime, and drop those that are slower.")
@click.option(
    "--feed",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Inputs to measure with, by name, .npz or .safetensors; default: random.",
)
@click.option("--optimize", "first", is_flag=True, help="Apply the rewrite rules first, as sardonyx.optimize does.")
@click.option("--target", default="cpu", show_default=True, help="Device of the kernels: cpu or cuda.")
@click.option(
    "--processor", help="Processors to compile for, as x86-64-v3, or sm_90 for GPUs; default: this machine's."
)
@precision_options
@calibration_option
@as_json
def compile_(
    model: Source,
    output: Path,
    select: str,
    inputs: str | None,
    outputs: str | None,
    measure: bool,
    feed: Path | None,
    first: bool,
    target: str,
    processor: str | None,
    options: Options,
    calibration: Sequence[Path],
    as_json: bool,
) -> None:
    """Compile parts of a model, and write a folder that onnxruntime can run without sardonyx.

    The folder has the model, the library with its C++ source, and manifest.json, which shows how to run it.
    """
    if model.kind != "onnx":
        raise OptionError(f"{model.text} is not an ONNX file", hint="use sardonyx compile --native")
    with show_status("reading the model", as_json) as say:
        onnx_model = model.model(Options.of())
        compiled = native.compile(
            optimize(onnx_model) if first else onnx_model,
            select=_parse_selection(select),
            inputs=_split_names(inputs),
            outputs=_split_names(outputs),
            measure=read_inputs(feed, onnx_model) if feed else measure,
            target=target,
            processor=processor,
            progress=say,
            calibration=model.calibration(calibration, options),
            **option_keywords(options),
        )
        compiled.save(output)
    _print_native(compiled, output, as_json)


@command.command(epilog=example("sardonyx native show compiled"))
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@as_json
def show(folder: Path, as_json: bool) -> None:
    """Check a compiled model, and print its report."""
    _print_native(native.load(folder), folder, as_json)


def _parse_selection(text: str) -> Choice:
    if text == "auto" or text == "all":
        return text
    return native.scope(text.removeprefix("scope:")) if text.startswith("scope:") else _split_names(text)


def _split_names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _print_native(compiled: native.NativeModel, folder: Path, as_json: bool) -> None:
    total = decimal(sum(path.stat().st_size for path in folder.iterdir()))
    summary = f"{folder}  {total}, for {compiled.processor.name} processors of {compiled.processor.machine}"
    print_result({"folder": str(folder), **compiled.report.as_dict()}, as_json, str(compiled.report), "", summary)
