"""`sardonyx export`: export a module as an ONNX file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.filesize import decimal
from torch.utils import _pytree as pytree

from sardonyx import native
from sardonyx.cli import _outline
from sardonyx.cli._feeds import suggest
from sardonyx.cli._messages import (
    example,
    format_counts,
    format_times,
    precision_lines,
    precision_result,
    print_result,
    show_status,
)
from sardonyx.cli._output import OutputFile, OutputFolder
from sardonyx.cli._parameters import as_json, calibration_option, engine_options, model_argument, precision_options
from sardonyx.cli._source import Source
from sardonyx.errors import OptionError
from sardonyx.options import Options


@click.command(
    epilog=example(
        "sardonyx export examples/models.py:resnet50 -o resnet50.onnx --verify",
        "sardonyx export examples/models.py:bert --dynamic input_ids.0=batch --dynamic attention_mask.0=batch",
        """sardonyx export examples/models.py:bert --dynamic-shapes '[{"0": "batch"}, {"0": "batch"}]'""",
    )
)
@model_argument
@click.option("-o", "--output", type=click.Path(), help="Default: NAME.onnx; a folder with --native.")
@click.option("--dynamic", multiple=True, metavar="NAME.AXIS=SIZE", help="A dynamic size of an argument.")
@click.option("--dynamic-shapes", metavar="JSON", help="All dynamic shapes, as in torch.export.")
@click.option("--opset", type=int, help="Default: the newest that the engine runs well.")
@click.option("--native", "natively", is_flag=True, help="Compile parts to native code; writes a folder.")
@click.option("--verify", is_flag=True, help="Run it in the engine, and compare with PyTorch.")
@engine_options
@precision_options
@calibration_option
@as_json
def command(
    model: Source,
    output: str | None,
    dynamic: Sequence[str],
    dynamic_shapes: str | None,
    opset: int | None,
    natively: bool,
    verify: bool,
    options: Options,
    calibration: Sequence[Path],
    as_json: bool,
) -> None:
    """Export a module as an ONNX file.

    MODEL is package.module:factory or path/file.py:factory, which returns a module and its arguments, or a .pt2 file.
    """
    if model.kind == "onnx":
        raise OptionError(f"{model.text} is already exported", hint="sardonyx optimize rewrites it")
    shapes = _dynamic_shapes(model, dynamic, dynamic_shapes)
    chosen = Options.of(options, opset=opset or options.opset, verify=verify or options.verify)
    kind = OutputFolder() if natively else OutputFile(".onnx")
    path = kind.convert(output or (model.name if natively else f"{model.name}.onnx"), None, None)
    with show_status("exporting", as_json) as say:
        calls = model.calibration(calibration, chosen)
        shaped = {"dynamic_shapes": shapes} if shapes is not None else {}
        program = model.program(chosen, calibration=calls, **shaped)
        compiled = native.compile(program.model, progress=say) if natively else None
        written = compiled.save(path) if compiled else program.save(path)
    report = program.report
    result = {
        "model": model.text,
        "output": str(written),
        "bytes": _size(written),
        "verified": chosen.verify,
        **_outline.summary(program.model),
        "rules": dict(report.rules.most_common()),
        **precision_result(report),
        "seconds": report.seconds,
    } | ({"native": compiled.report.as_dict()} if compiled else {})
    print_result(
        result,
        as_json,
        *_outline.lines(result),
        f"rules      {format_counts(report.rules)}",
        *precision_lines(report),
        f"time       {format_times(report.seconds)}",
        *([str(compiled.report)] if compiled else []),
        f"{written}  {decimal(result['bytes'])}{', verified against PyTorch' if chosen.verify else ''}",
    )


def _size(written: Path) -> int:
    files = list(written.iterdir()) if written.is_dir() else [written, written.with_name(f"{written.name}.data")]
    return sum(path.stat().st_size for path in files if path.is_file())


def _dynamic_shapes(model: Source, dynamic: Sequence[str], text: str | None) -> Any:
    """Return the dynamic shapes for `sardonyx.export`; None if no option sets them."""
    if text is not None:
        if dynamic:
            raise click.UsageError("--dynamic and --dynamic-shapes cannot be combined")
        return _parse_shapes(text)
    if not dynamic:
        return None
    arguments = _arguments(model)
    shapes: dict[str, Any] = {name: pytree.tree_map(lambda leaf: None, x) for name, x in arguments.items()}
    for text in dynamic:
        name, axis, size = _split_dynamic(text)
        if name not in arguments:
            raise OptionError(f"the model has no argument {name!r}", hint=suggest(name, arguments))
        index = _axis(name, axis, arguments[name])
        shapes[name] = {**(shapes[name] or {}), index: size}
    return shapes


def _split_dynamic(text: str) -> tuple[str, str, str]:
    dimension, _, size = text.partition("=")
    name, _, axis = dimension.rpartition(".")
    if not (name and axis.removeprefix("-").isdecimal() and size.isidentifier()):
        raise click.BadParameter(f"{text!r} is not of the form NAME.AXIS=SIZE, as input_ids.0=batch")
    return name, axis, size


def _arguments(model: Source) -> Mapping[str, Any]:
    """Return the example arguments by name."""
    module, call = model.module(), model.example()
    if call is None:
        return {}
    return inspect.signature(getattr(module, "forward", module)).bind(*call[0], **call[1]).arguments


def _axis(name: str, axis: str, argument: Any) -> int:
    if not isinstance(argument, torch.Tensor):
        raise OptionError(f"the argument {name!r} is not a tensor", hint="use --dynamic-shapes for nested arguments")
    if not -argument.dim() <= int(axis) < argument.dim():
        raise OptionError(f"{name!r} has {argument.dim()} dimensions, but no axis {axis}")
    return int(axis) % argument.dim()


def _parse_shapes(text: str) -> Any:
    try:
        shapes = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"--dynamic-shapes is not JSON: {error}") from error
    if not isinstance(shapes, (dict, list)):
        raise click.BadParameter(f"--dynamic-shapes is {text}, not an object or a list with an entry per argument")
    return _integer_keys(shapes)


def _integer_keys(shapes: Any) -> Any:
    """Convert axes, which are text in JSON, to integers."""
    if isinstance(shapes, dict):
        return {int(key) if key.isdigit() else key: _integer_keys(value) for key, value in shapes.items()}
    return [_integer_keys(value) for value in shapes] if isinstance(shapes, list) else shapes
