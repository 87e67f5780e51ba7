"""`sardonyx inspect`: what is in a model."""

from __future__ import annotations

import click
from rich.filesize import decimal

from sardonyx.cli import _outline
from sardonyx.cli._feeds import format_dims
from sardonyx.cli._parameters import Source, as_json, example, model_argument, print_result, table
from sardonyx.options import Options


@click.command(epilog=example("sardonyx inspect model.onnx", "sardonyx inspect examples/models.py:resnet50 --nodes"))
@model_argument
@click.option("--nodes", "with_nodes", is_flag=True, help="Every node, too.")
@as_json
def command(model: Source, with_nodes: bool, as_json: bool) -> None:
    """Tell what a model is made of.

    MODEL is an .onnx file; or a .pt2 file or module:factory, which is exported first.
    """
    held = model.model(Options.of())
    told = {"model": model.text, **_outline.summary(held)}
    listed = _outline.nodes(held) if with_nodes else []
    largest = [(x["name"], x["dtype"], format_dims(x["shape"]), decimal(x["bytes"])) for x in told["largest"]]
    print_result(
        {**told, "node_list": listed} if with_nodes else told,
        as_json,
        *_outline.lines(told),
        "",
        table(["largest weights", "dtype", "sizes", "size"], largest, right=["size"]),
        *(["", *map(_outline.node_line, listed)] if with_nodes else []),
    )
