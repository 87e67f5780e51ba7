"""`sardonyx completion`: shell completion of commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from sardonyx.cli._messages import example, print_result
from sardonyx.cli._parameters import as_json
from sardonyx.errors import SardonyxError

_FILES = {
    "bash": 'eval "$(sardonyx completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(sardonyx completion zsh)"  # in ~/.zshrc',
    "fish": "sardonyx completion fish | source  # in ~/.config/fish/config.fish",
}


@click.command(epilog=example(*_FILES.values()))
@click.argument("shell", type=click.Choice(list(_FILES)))
@as_json
@click.pass_context
def command(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print the script that completes commands and options in a shell."""
    completion = get_completion_class(shell)
    if completion is None:
        raise SardonyxError(f"this version of click has no completion for {shell}", hint="pip install --upgrade click")
    script = completion(ctx.find_root().command, {}, "sardonyx", "_SARDONYX_COMPLETE").source()
    print_result({"shell": shell, "line": _FILES[shell], "script": script}, as_json, script.strip())
