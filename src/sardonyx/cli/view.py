"""`sardonyx view`: show a model in Netron, or print an outline of it."""

from __future__ import annotations

import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from sardonyx.cli import _outline
from sardonyx.cli._messages import example, print_result
from sardonyx.cli._parameters import as_json, model_argument
from sardonyx.cli._source import Source
from sardonyx.options import Options

_NO_NETRON = "netron is not installed: printing the outline instead\n  next: pip install netron"


@click.command(epilog=example("sardonyx view model.onnx", "sardonyx view examples/models.py:bert --outline | less"))
@model_argument
@click.option("--outline", is_flag=True, help="Print the outline, even if Netron is installed.")
@as_json
def command(model: Source, outline: bool, as_json: bool) -> None:
    """Show a model in the browser with Netron; without Netron, print its outline."""
    use_netron = not outline and not as_json
    if use_netron and find_spec("netron"):
        _open_netron(model)
        return
    onnx_model = model.model(Options.of())
    if use_netron:
        click.echo(_NO_NETRON, err=True)
    result = {"model": model.text, **_outline.summary(onnx_model), "node_list": _outline.nodes(onnx_model)}
    print_result(result, as_json, *_outline.lines(result), "", *map(_outline.node_line, result["node_list"]))


def _open_netron(model: Source) -> None:
    """Serve the model until the user stops it; a torch model is exported to a temporary file."""
    netron = import_module("netron")
    with tempfile.TemporaryDirectory() as folder:
        path = model.text
        if model.kind != "onnx":
            path = str(model.program(Options.of()).save(Path(folder) / f"{model.name}.onnx"))
        netron.start(path)
        netron.wait()
