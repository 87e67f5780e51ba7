"""What commands take: a model, inputs for it, an engine and options; and how they tell what they found."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from sardonyx.cli._messages import example, format_counts, format_times, print_result, progress_bar, show_status, table
from sardonyx.cli._source import MODEL_KEY, Source, find_source, in_memory, option_keywords, tensor
from sardonyx.options import Options
from sardonyx.telemetry.text import duration

__all__ = [
    "MODEL",
    "FiniteRange",
    "Source",
    "as_json",
    "duration",
    "engine_options",
    "example",
    "find_source",
    "format_counts",
    "format_times",
    "in_memory",
    "input_options",
    "model_argument",
    "option_keywords",
    "options_from",
    "print_result",
    "progress_bar",
    "show_status",
    "table",
    "tensor",
]

F = TypeVar("F", bound=Callable[..., Any])


class ModelType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have none
    """A model, by the text that names it."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Source:
        """The source of that text, which is remembered for the error that something ends with."""
        found = value if isinstance(value, Source) else find_source(value)
        if ctx is not None:
            ctx.meta[MODEL_KEY] = found
        return found


class FiniteRange(click.FloatRange):
    """A number in a range; `nan`, which every comparison lets through, and infinities are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is no number", param, ctx)
        return found


MODEL = ModelType()
model_argument = click.argument("model", type=MODEL, metavar="MODEL")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes and times in seconds.")


def _parse_pairs(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    for text in given:
        if not all(text.partition("=")[::2]):
            raise click.BadParameter(f"{text!r} is not of the form {param.metavar}", ctx, param)
    return {name: value for name, _, value in (text.partition("=") for text in given)}


def _parse_sizes(ctx: click.Context, param: click.Parameter, given: Sequence[str]) -> dict[str, int]:
    pairs = _parse_pairs(ctx, param, given)
    for name, value in pairs.items():
        if not value.isdecimal():
            raise click.BadParameter(f"{name} is {value!r}, which is no size", ctx, param)
    return {name: int(value) for name, value in pairs.items()}


def input_options(command: F) -> F:
    """--inputs, --size and --seed, which the command takes as `inputs`, `sizes` and `seed`."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    several: dict[str, Any] = {"multiple": True, "callback": _parse_sizes, "metavar": "NAME=N"}
    command = click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the random inputs."
    )(command)
    command = click.option("--size", "sizes", help="What a size with a name is, as batch=4; else 1.", **several)(
        command
    )
    told = "Inputs by name, .npz or .safetensors; else those that MODEL comes with, else random ones."
    return click.option("--inputs", type=file, metavar="FILE", help=told)(command)


def engine_options(command: F) -> F:
    """--engine and --option, which the command takes as `options`."""

    @functools.wraps(command)
    def with_options(*args: Any, engine: str | None, option: Mapping[str, str], **given: Any) -> Any:
        return command(*args, options=options_from(engine, option), **given)

    several: dict[str, Any] = {"multiple": True, "callback": _parse_pairs, "metavar": "KEY=VALUE"}
    told = "What runs it; `sardonyx engines` lists them."
    with_options = click.option("--option", help="An option of sardonyx.Options; may be repeated.", **several)(
        with_options
    )
    return click.option("--engine", metavar="NAME", help=told)(with_options)  # type: ignore[return-value]  # wraps it


def options_from(engine: str | None, given: Mapping[str, str]) -> Options:
    """Options whose values are text: JSON where they are not meant to be text.

    >>> options_from("reference", {"opset": "21", "optimize": "none"}).opset
    21
    """
    written = {field.name for field in dataclasses.fields(Options) if str(field.type) in ("str", "str | None")}
    values = {key: text if key in written else _parse_json(text) for key, text in given.items()}
    return Options.of({**values, **({"engine": engine} if engine else {})})


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
