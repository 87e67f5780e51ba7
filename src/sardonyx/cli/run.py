"""`sardonyx run`: run a model once, or several times."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from sardonyx.cli._feeds import write_arrays
from sardonyx.cli._messages import example, print_result, show_status, table
from sardonyx.cli._output import OutputFile
from sardonyx.cli._parameters import as_json, engine_options, input_options, model_argument, precision_options
from sardonyx.cli._source import Inputs, Source
from sardonyx.options import Options
from sardonyx.telemetry.text import duration, summarize_tensor


@click.command(
    epilog=example(
        "sardonyx run model.onnx --inputs inputs.npz -o outputs.npz",
        "sardonyx run examples/models.py:bert --engine openvino --repeat 10",
        "sardonyx run model.onnx --size batch=4 --size tokens=32",
    )
)
@model_argument
@click.option(
    "-o", "--output", type=OutputFile(".npz", ".safetensors"), help="Write the outputs: .npz or .safetensors."
)
@click.option(
    "--repeat", type=click.IntRange(1), default=1, show_default=True, help="Number of calls; the first takes longest."
)
@input_options
@engine_options
@precision_options
@as_json
def command(
    model: Source,
    output: Path | None,
    repeat: int,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Run a model in an engine, with inputs from a file or with random ones.

    MODEL is an .onnx file, a .pt2 file or module:factory; the rewrite rules are applied first.
    """
    with show_status("preparing", as_json), torch.no_grad():
        exported, rest = model.lowered(inputs, options)
        program, feeds = model.as_file(exported, inputs, rest, optimize="none")
        seconds, results = [], []
        for _ in range(repeat):
            started = time.perf_counter()
            results = program(*feeds.values())
            seconds.append(time.perf_counter() - started)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    outputs = dict(zip(program.outputs, results, strict=True))
    if output is not None:
        write_arrays(output, outputs)
    print_result(
        {
            "model": model.text,
            "engine": options.engine,
            "inputs": {name: _describe(x) for name, x in feeds.items()},
            "outputs": {name: _describe(x) for name, x in outputs.items()},
            "seconds": seconds,
            "output": output and str(output),
        },
        as_json,
        table(["input", ""], [(name, summarize_tensor(x)) for name, x in feeds.items()]),
        table(["output", ""], [(name, summarize_tensor(x)) for name, x in outputs.items()]),
        _times(options.engine, seconds),
        *([f"{output} written"] if output else []),
    )


def _times(engine: str, seconds: list[float]) -> str:
    first = f"{engine}: {duration(seconds[0])} for the first call, including loading the model"
    return first + (f"; then {duration(median(seconds[1:]))}" if len(seconds) > 1 else "")


def _describe(x: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
