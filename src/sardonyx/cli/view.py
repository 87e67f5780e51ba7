"""`sardonyx view`: a model drawn by Netron, or printed as an outline."""

from __future__ import annotations

import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from sardonyx.cli import _outline
from sardonyx.cli._parameters import Source, as_json, example, model_argument, print_result
from sardonyx.options import Options

_NO_NETRON = "netron, which draws models, is not installed: here is the outline\n  next: pip install netron"


@click.command(epilog=example("sardonyx view model.onnx", "sardonyx view examples/models.py:bert --outline | less"))
@model_argument
@click.option("--outline", is_flag=True, help="Print the outline, even where Netron is installed.")
@as_json
def command(model: Source, outline: bool, as_json: bool) -> None:
    """Draw a model in the browser, by Netron; without Netron, print its outline."""
    drawn = not outline and not as_json
    if drawn and find_spec("netron"):
        _open_netron(model)
        return
    held = model.model(Options.of())
    if drawn:
        click.echo(_NO_NETRON, err=True)
    told = {"model": model.text, **_outline.summary(held), "node_list": _outline.nodes(held)}
    print_result(told, as_json, *_outline.lines(told), "", *map(_outline.node_line, told["node_list"]))


def _open_netron(model: Source) -> None:
    """Serve the model until the user ends it; one that is no file yet is written to one."""
    netron = import_module("netron")
    with tempfile.TemporaryDirectory() as folder:
        held = model.text
        if model.kind != "onnx":
            held = str(model.program(Options.of()).save(Path(folder) / f"{model.name}.onnx"))
        netron.start(held)
        netron.wait()
