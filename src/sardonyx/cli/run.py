"""`sardonyx run`: a model called once, or a few times."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from sardonyx.cli._feeds import write
from sardonyx.cli._given import (
    Inputs,
    Source,
    as_json,
    duration,
    engine_options,
    example,
    input_options,
    model_argument,
    table,
    tell,
    working,
)
from sardonyx.cli._output import OutputFile
from sardonyx.options import Options
from sardonyx.telemetry.text import tensor_in_words


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
@click.option("--repeat", type=click.IntRange(1), default=1, show_default=True, help="Calls; the first takes longest.")
@input_options
@engine_options
@as_json
def command(
    model: Source,
    output: Path | None,
    repeat: int,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Run a model in an engine, with inputs of a file or with random ones.

    MODEL is an .onnx file, a .pt2 file or module:factory; the rewrite rules are applied first.
    """
    with working("preparing", as_json), torch.no_grad():
        held = model.program(Options.of(options, native=False)).model  # kernels are made below, with their library
        program, given = model.as_file(held, inputs, options, optimize="none")
        seconds, results = [], []
        for _ in range(repeat):
            started = time.perf_counter()
            results = program(*given.values())
            seconds.append(time.perf_counter() - started)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    outputs = dict(zip(program.outputs, results, strict=True))
    if output is not None:
        write(output, outputs)
    tell(
        {
            "model": model.text,
            "engine": options.engine,
            "inputs": {name: _described(x) for name, x in given.items()},
            "outputs": {name: _described(x) for name, x in outputs.items()},
            "seconds": seconds,
            "output": output and str(output),
        },
        as_json,
        table(["input", ""], [(name, tensor_in_words(x)) for name, x in given.items()]),
        table(["output", ""], [(name, tensor_in_words(x)) for name, x in outputs.items()]),
        _times(options.engine, seconds),
        *([f"{output} written"] if output else []),
    )


def _times(engine: str, seconds: list[float]) -> str:
    first = f"{engine}: {duration(seconds[0])} for the first call, with what it takes to load the model"
    return first + (f"; then {duration(median(seconds[1:]))}" if len(seconds) > 1 else "")


def _described(x: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
