"""`sardonyx engines`: list the engines."""

from __future__ import annotations

from dataclasses import asdict

import click

from sardonyx.cli._messages import example, print_result, table
from sardonyx.cli._parameters import as_json
from sardonyx.engines import engines


@click.command(epilog=example("sardonyx engines", "sardonyx run examples/models.py:bert --engine openvino"))
@as_json
def command(as_json: bool) -> None:
    """List the engines: whether they are installed, and if not, why."""
    listed = engines()
    rows = [(x.name, "yes" if x.installed else "no", x.version or x.reason) for x in listed]
    print_result(
        [{**asdict(x), "installed": x.installed} for x in listed],
        as_json,
        table(["engine", "installed", "version, or why not"], rows),
    )
