"""`sardonyx`: a group of the commands that lie beside this file."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

import sardonyx.cli
from sardonyx.errors import SardonyxError


class _Beside(click.Group):
    """Finds commands as modules of this package, each with its `command`, and imports the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(found.name for found in iter_modules(sardonyx.cli.__path__) if not found.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"sardonyx.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what the package raises on purpose is for the user, without a traceback."""
        try:
            return super().invoke(ctx)
        except SardonyxError as error:
            raise click.ClickException(str(error)) from error


@click.command(cls=_Beside, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sardonyx")
def program() -> None:
    """Run PyTorch through ONNX."""
