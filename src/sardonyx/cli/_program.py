"""`sardonyx`: a group of the commands that lie beside this file.

It exits with 0 when what was asked for is done; 1 when it failed, as a check that is not passed or a difference that is
found; 2 after a wrong use of the command line; 3 when the model or its input is at fault; 4 when a package or a program
is missing; 130 after Ctrl-C. Errors are a line "error: …", and where there is one a line "next: …" with the next step.
"""

from __future__ import annotations

import logging
import traceback
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import click

import sardonyx.cli
from sardonyx.cli._messages import WarningHandler, example, printable
from sardonyx.errors import MissingDependency, SardonyxError, VerificationError

FAILED, BAD_MODEL, MISSING, INTERRUPTED = 1, 3, 4, 130
_EXIT_CODES = """\b
Exit codes:
  0  done
  1  what was asked for failed: a check not passed, a difference found
  2  wrong use of the command line
  3  the model or its input is at fault
  4  a package or a program is missing
  130  ended by Ctrl-C"""


class ErrorMessage(click.ClickException):
    """An error for the user, with the code that the program exits with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for classes, and reads it from the error

    def show(self, file: Any = None) -> None:
        """Print it on stderr."""
        click.echo(printable(self.message), file=file, err=True)


class _CommandGroup(click.Group):
    """Finds commands as modules of this package, each with its `command`, and imports the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(found.name for found in iter_modules(sardonyx.cli.__path__) if not found.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"sardonyx.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whatever is raised becomes a line for the user, with a traceback only for --debug."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except KeyboardInterrupt as error:
            raise ErrorMessage("\ninterrupted", INTERRUPTED) from error
        except Exception as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            raise (
                ErrorMessage("\ninterrupted", INTERRUPTED) if _is_interrupted(error) else _format_error(error, ctx)
            ) from error


def _is_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: one that comes while a package is loaded is told as if it were missing."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _format_error(error: Exception, ctx: click.Context) -> ErrorMessage:
    error = _cause(error)
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, SardonyxError):
        said = f"{error.filename}: {error.strerror}"
        return ErrorMessage(f"error: {said}\n  next: look at that path, its folder, and the space on its disk", FAILED)
    if not isinstance(error, SardonyxError):
        fault = _model_fault(ctx)
        if fault:
            return ErrorMessage(f"error: {fault}\n  next: export or copy the file again", BAD_MODEL)
        said = (str(error).strip() or "no reason given").splitlines()[0]
        return ErrorMessage(f"error: {type(error).__name__}: {said}\n  next: sardonyx --debug … shows where", FAILED)
    codes = {MissingDependency: MISSING, VerificationError: FAILED}
    code = next((code for kind, code in codes.items() if isinstance(error, kind)), BAD_MODEL)
    return ErrorMessage(f"error: {error}", code)


def _model_fault(ctx: click.Context) -> str | None:
    """What is wrong with the model of a command that failed unexpectedly."""
    from sardonyx.cli._source import MODEL_KEY  # loads torch, which `sardonyx --help` need not wait for

    model = ctx.meta.get(MODEL_KEY)
    return model.fault() if model is not None else None


def _cause(error: Exception) -> Exception:
    """An error of ours that torch.compile has packed into one of its own, else the error itself."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, SardonyxError) else error


_EXAMPLE = example(
    "sardonyx doctor",
    "sardonyx export examples/models.py:bert -o bert.onnx",
    "sardonyx run bert.onnx",
    "sardonyx bench examples/models.py:bert",
)


@click.command(
    cls=_CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{_EXAMPLE}\n\n{_EXIT_CODES}",
)
@click.version_option(package_name="sardonyx")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def program(debug: bool) -> None:
    """Run PyTorch through ONNX."""
    log = logging.getLogger("sardonyx")
    if not any(isinstance(handler, WarningHandler) for handler in log.handlers):
        log.addHandler(WarningHandler())
