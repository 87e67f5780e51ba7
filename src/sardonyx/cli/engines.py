"""`sardonyx engines`: what can run a model here."""

from __future__ import annotations

from dataclasses import asdict

import click

from sardonyx.cli._parameters import as_json, example, print_result, table
from sardonyx.engines import engines


@click.command(epilog=example("sardonyx engines", "sardonyx run examples/models.py:bert --engine openvino"))
@as_json
def command(as_json: bool) -> None:
    """List the engines: installed or not, and why."""
    found = engines()
    rows = [(x.name, "yes" if x.installed else "no", x.version or x.reason) for x in found]
    print_result(
        [{**asdict(x), "installed": x.installed} for x in found],
        as_json,
        table(["engine", "installed", "version, or why not"], rows),
    )
