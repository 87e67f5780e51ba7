"""`sardonyx inspect`: summarize a model."""

from __future__ import annotations

import click
from rich.filesize import decimal

from sardonyx.cli import _outline
from sardonyx.cli._feeds import format_dims
from sardonyx.cli._messages import example, print_result, table
from sardonyx.cli._parameters import as_json, model_argument
from sardonyx.cli._source import Source
from sardonyx.options import Options


@click.command(epilog=example("sardonyx inspect model.onnx", "sardonyx inspect examples/models.py:resnet50 --nodes"))
@model_argument
@click.option("--nodes", "with_nodes", is_flag=True, help="List every node too.")
@as_json
def command(model: Source, with_nodes: bool, as_json: bool) -> None:
    """Print a summary of a model.

    MODEL is an .onnx file; or a .pt2 file or module:factory, which is exported first.
    """
    onnx_model = model.model(Options.of())
    summary = {"model": model.text, **_outline.summary(onnx_model)}
    nodes = _outline.nodes(onnx_model) if with_nodes else []
    largest = [(x["name"], x["dtype"], format_dims(x["shape"]), decimal(x["bytes"])) for x in summary["largest"]]
    print_result(
        {**summary, "node_list": nodes} if with_nodes else summary,
        as_json,
        *_outline.lines(summary),
        "",
        table(["largest weights", "dtype", "sizes", "size"], largest, right=["size"]),
        *(["", *map(_outline.node_line, nodes)] if with_nodes else []),
    )
