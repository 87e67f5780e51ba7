"""`sardonyx optimize`: apply the rewrite rules to an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.filesize import decimal

from sardonyx.cli import _outline
from sardonyx.cli._messages import (
    example,
    format_counts,
    format_times,
    precision_lines,
    precision_result,
    print_result,
    show_status,
)
from sardonyx.cli._output import OutputFile
from sardonyx.cli._parameters import as_json, calibration_option, engine_options, model_argument, precision_options
from sardonyx.cli._source import Source
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.options import Options


@click.command(
    epilog=example(
        "sardonyx optimize model.onnx -o faster.onnx", "sardonyx optimize model.onnx --option optimize=default-Silu"
    )
)
@model_argument
@click.option("-o", "--output", type=OutputFile(".onnx"), help="Default: NAME.optimized.onnx in its folder.")
@click.option("--opset", type=int, help="Convert to a later opset first: 23 has attention and RMS norm.")
@engine_options
@precision_options
@calibration_option
@as_json
def command(
    model: Source,
    output: Path | None,
    opset: int | None,
    options: Options,
    calibration: Sequence[Path],
    as_json: bool,
) -> None:
    """Rewrite an ONNX file by the rules that are applied to compiled models.

    The result is specific to the engine: for onnxruntime it may use operators of com.microsoft.
    """
    if model.kind != "onnx":
        raise OptionError(f"{model.text} is not an ONNX file", hint="use sardonyx export, which applies the rules too")
    before = _outline.summary(model.model(options))
    path = output or OutputFile(".onnx").convert(Path(model.text).with_suffix(".optimized.onnx"), None, None)
    if path.resolve() == Path(model.text).resolve():
        raise SardonyxError(f"{path} is the model itself", hint="name another file with -o FILE")
    with show_status("rewriting", as_json):
        chosen = Options.of(options, opset=opset or options.opset)
        program = model.program(chosen, calibration=model.calibration(calibration, chosen))
        program.save(path)
    after, report = _outline.summary(program.model), program.report
    result = {
        "model": model.text,
        "output": str(path),
        "bytes": path.stat().st_size,
        "opset": after["opset"],
        "nodes_before": before["nodes"],
        "nodes_after": after["nodes"],
        "operators": after["operators"],
        "rules": dict(report.rules.most_common()),
        **precision_result(report),
        "seconds": report.seconds,
    }
    print_result(
        result,
        as_json,
        f"nodes   {before['nodes']} → {after['nodes']}: {format_counts(after['operators'])}",
        f"rules   {format_counts(report.rules) or 'none applies'}",
        *precision_lines(report),
        f"time    {format_times(report.seconds)}",
        f"{path}  {decimal(result['bytes'])}, opset {after['opset']}",
    )
