"""Arguments and options that several commands share: a model, its inputs, an engine, options of sardonyx."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from sardonyx.cli._source import MODEL_KEY, Inputs, Source, find_source
from sardonyx.options import Options, Precision, parse_value

F = TypeVar("F", bound=Callable[..., Any])


class ModelType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have none
    """A click type for a model: a file, or a factory in Python."""

    name = "model"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Source:
        """Return the source, which is stored in the context for error messages."""
        model = value if isinstance(value, Source) else find_source(value)
        if ctx is not None:
            ctx.meta[MODEL_KEY] = model
        return model


class FiniteRange(click.FloatRange):
    """A finite number in a range; click accepts `nan` and infinities."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


MODEL = ModelType()
model_argument = click.argument("model", type=MODEL, metavar="MODEL")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes and times in seconds.")


def _parse_pairs(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if not all(text.partition("=")[::2]):
            raise click.BadParameter(f"{text!r} is not of the form {param.metavar}", ctx, param)
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _parse_sizes(ctx: click.Context, param: click.Parameter, texts: Sequence[str]) -> dict[str, int]:
    pairs = _parse_pairs(ctx, param, texts)
    for name, value in pairs.items():
        if not value.isdecimal():
            raise click.BadParameter(f"{name} is {value!r}, which is not a size", ctx, param)
    return {name: int(value) for name, value in pairs.items()}


def input_options(command: F) -> F:
    """Add --inputs, --size and --seed, as the parameter `inputs`."""

    @functools.wraps(command)
    def with_inputs(*args: Any, inputs: Path | None, sizes: Mapping[str, int], seed: int, **kwargs: Any) -> Any:
        return command(*args, inputs=Inputs(inputs, sizes, seed), **kwargs)

    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    several: dict[str, Any] = {"multiple": True, "callback": _parse_sizes, "metavar": "NAME=N"}
    with_inputs = click.option(
        "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the random inputs."
    )(with_inputs)
    with_inputs = click.option("--size", "sizes", help="Value of a named size, as batch=4; default 1.", **several)(
        with_inputs
    )
    help_text = "Inputs by name, .npz or .safetensors; default: the example arguments of MODEL, or random inputs."
    return click.option("--inputs", type=file, metavar="FILE", help=help_text)(with_inputs)  # type: ignore[return-value]  # wraps it


def engine_options(command: F) -> F:
    """Add --engine and --option, as the parameter `options`."""

    @functools.wraps(command)
    def with_options(*args: Any, engine: str | None, option: Mapping[str, str], **kwargs: Any) -> Any:
        return command(*args, options=options_from(engine, option, **_precision_in(kwargs)), **kwargs)

    several: dict[str, Any] = {"multiple": True, "callback": _parse_pairs, "metavar": "KEY=VALUE"}
    help_text = "The engine; `sardonyx engines` lists them."
    with_options = click.option("--option", help="An option of sardonyx.Options; may be repeated.", **several)(
        with_options
    )
    return click.option("--engine", metavar="NAME", help=help_text)(with_options)  # type: ignore[return-value]  # wraps it


def precision_options(command: F) -> F:
    """Add --precision and --max-drop to the parameter `options`; below `engine_options`, if the command has these."""

    @functools.wraps(command)
    def with_precision(
        *args: Any, precision: str | None, max_drop: float | None, options: Options | None = None, **kwargs: Any
    ) -> Any:
        given = _precision_in({"precision": precision, "max_drop": max_drop})
        return command(*args, options=options or Options.of(given), **kwargs)

    help_text = "How far results may be from those in float32; default: 0.01."
    with_precision = click.option("--max-drop", type=FiniteRange(0), metavar="SHARE", help=help_text)(with_precision)
    names = click.Choice(list(get_args(Precision)))
    help_text = "Of linear layers, within --max-drop: see docs/precision.md."
    return click.option("--precision", type=names, help=help_text)(with_precision)  # type: ignore[return-value]  # wraps it


def _precision_in(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that --precision and --max-drop set."""
    return {name: parameters[name] for name in ("precision", "max_drop") if parameters.get(name) is not None}


calibration_option = click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Inputs by name that --precision is chosen by, .npz or .safetensors; one file a call.",
)


def options_from(engine: str | None, texts: Mapping[str, str], **given: Any) -> Options:
    """Return options from text, where values that are not strings are parsed as JSON, and from parameters.

    >>> options_from("reference", {"opset": "21", "optimize": "none"}).opset
    21
    """
    strings = {field.name for field in dataclasses.fields(Options) if str(field.type) in ("str", "str | None")}
    values = {key: text if key in strings else parse_value(text) for key, text in texts.items()}
    return Options.of({**values, **({"engine": engine} if engine else {}), **given})
