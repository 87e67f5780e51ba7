"""The program `sardonyx`: a group of the commands in this package.

Exit codes: 0 success; 1 failure, such as a failed check or a difference; 2 wrong command line; 3 bad model or input;
4 a package or a program is missing; 130 Ctrl-C. Errors are printed as "error: …", with "next: …" for the next step.
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
  0  success
  1  failure: a check failed, or results differ
  2  wrong command line
  3  bad model or input
  4  a package or a program is missing
  130  Ctrl-C"""


class ErrorMessage(click.ClickException):
    """An error message for the user, with the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for classes, and reads it from the error

    def show(self, file: Any = None) -> None:
        """Print the message on stderr."""
        click.echo(printable(self.message), file=file, err=True)


class _CommandGroup(click.Group):
    """Finds commands as modules of this package, each with a `command`, and imports them on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(x.name for x in iter_modules(sardonyx.cli.__path__) if not x.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"sardonyx.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; exceptions become error messages, with a traceback only for --debug."""
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
    """Whether Ctrl-C caused an error: during an import, it may be reported as a missing package."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _format_error(error: Exception, ctx: click.Context) -> ErrorMessage:
    error = _cause(error)
    if isinstance(error, OSError) and error.filename is not None and not isinstance(error, SardonyxError):
        reason = f"{error.filename}: {error.strerror}"
        return ErrorMessage(f"error: {reason}\n  next: check that path, its folder, and the free disk space", FAILED)
    if not isinstance(error, SardonyxError):
        fault = _model_fault(ctx)
        if fault:
            return ErrorMessage(f"error: {fault}\n  next: export or copy the file again", BAD_MODEL)
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return ErrorMessage(f"error: {type(error).__name__}: {reason}\n  next: sardonyx --debug … shows where", FAILED)
    codes = {MissingDependency: MISSING, VerificationError: FAILED}
    code = next((code for kind, code in codes.items() if isinstance(error, kind)), BAD_MODEL)
    return ErrorMessage(f"error: {error}", code)


def _model_fault(ctx: click.Context) -> str | None:
    """Return why the model of a command is invalid, after an unexpected error."""
    from sardonyx.cli._source import MODEL_KEY  # imports torch, which `sardonyx --help` does not need

    model = ctx.meta.get(MODEL_KEY)
    return model.fault() if model is not None else None


def _cause(error: Exception) -> Exception:
    """Return the `SardonyxError` inside an error of torch.compile, else the error itself."""
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
