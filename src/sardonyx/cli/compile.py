"""`sardonyx compile`: a model made ready for an engine ahead of its first call, or turned into native code."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.filesize import decimal

from sardonyx import native
from sardonyx.cache.disk import Entry, default_cache
from sardonyx.cache.manifest import MANIFEST
from sardonyx.cli._output import OutputFolder, atomic_folder
from sardonyx.cli._parameters import (
    Source,
    as_json,
    duration,
    engine_options,
    example,
    in_memory,
    input_options,
    model_argument,
    option_keywords,
    print_result,
    show_status,
    tensor,
)
from sardonyx.doors.optimize import optimize
from sardonyx.engines import find
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.options import Options

_NOT_CACHED = "nothing is kept on disk: the cache is turned off, or cannot be written"
_AMBIGUOUS = "what is kept on disk cannot be told from what another process has kept meanwhile"
_COARSE = 0.1
"""Seconds by which the clock of a file system may lag."""


@click.command(
    epilog=example(
        "sardonyx compile model.onnx --native -o compiled",
        "sardonyx compile examples/models.py:bert --engine openvino",
        "sardonyx compile examples/models.py:bert --engine iree -o artifact",
    )
)
@model_argument
@click.option("-o", "--output", type=OutputFolder(), help="A folder for what is compiled.")
@click.option("--native", "natively", is_flag=True, help="Native code, as `sardonyx native compile` makes it.")
@input_options
@engine_options
@as_json
def command(
    model: Source,
    output: Path | None,
    natively: bool,
    inputs: Path | None,
    sizes: dict[str, int],
    seed: int,
    options: Options,
    as_json: bool,
) -> None:
    """Compile a model for an engine, which then starts at once, or to native code.

    What an engine compiles is kept in the cache, and with -o copied to a folder. The model is called once.
    """
    if output is not None and output.exists():
        raise SardonyxError(f"{output} exists already", hint="choose another folder, or remove it")
    if natively:
        place = output or OutputFolder(over=MANIFEST).convert(f"{model.name}-native", None, None)
        _compile_native(model, place, options, as_json)
        return
    engine = find(options.engine)
    keeps = engine.identity(options) is not None
    if output is not None and not keeps:
        raise OptionError(
            f"the engine {engine.name!r} makes a model ready at each start, and has nothing to save",
            hint="--native compiles for onnxruntime; `sardonyx export` and `sardonyx optimize` write the model",
        )
    with show_status(f"compiling with {engine.name}", as_json), torch.no_grad():
        held = model.program(Options.of(options, native=False)).model  # kernels are made below, with their library
        feeds = model.feeds(inputs, sizes, seed, held)
        program = optimize(in_memory(held), **option_keywords(options, optimize="none"))
        started, then = time.perf_counter(), time.time()
        program(*(tensor(feeds[name]) for name in program.inputs))
        seconds = time.perf_counter() - started
    kept = _used_entries(options, then) if keeps else []
    entry = kept[0] if len(kept) == 1 else None
    cached = _entry_folder(options, entry)
    if output is not None:
        _copy_artifact(cached, output, kept)
    told = {
        "model": model.text,
        "engine": engine.name,
        "seconds": seconds,
        "cache_key": entry.key if entry else None,
        "cached": cached and str(cached),
        "bytes": entry.bytes if entry else 0,
        "output": output and str(output),
    }
    print_result(told, as_json, *_lines(told, keeps, kept))


def _lines(told: dict[str, Any], keeps: bool, kept: list[Entry]) -> list[str]:
    ready = f"{told['engine']} is ready, and was called, after {duration(told['seconds'])}"
    if told["cached"] is None and keeps:
        return [ready, _AMBIGUOUS if kept else _NOT_CACHED]
    if told["cached"] is None:
        return [ready, f"{told['engine']} keeps nothing on disk: it makes the model ready at each start"]
    lines = [ready, f"{told['cached']}  {decimal(told['bytes'])}, for the next process"]
    return lines + ([f"{told['output']}  a copy"] if told["output"] else [])


def _used_entries(options: Options, since: float) -> list[Entry]:
    """The entries of the cache that the engine has used since then: several if another process has used it as well."""
    cache = default_cache(options)
    entries = cache.entries() if cache else []
    about = {"what": "artifact", "engine": options.engine}
    return [x for x in entries if x.bytes and x.used > since - _COARSE and about.items() <= x.about.items()]


def _entry_folder(options: Options, entry: Entry | None) -> Path | None:
    cache = default_cache(options)
    return cache.get(entry.key) if cache and entry else None


def _copy_artifact(place: Path | None, output: Path, kept: list[Entry]) -> None:
    if place is None:
        hint = "SARDONYX_CACHE_DIR names a folder for it that can be written"
        raise SardonyxError(_AMBIGUOUS if kept else _NOT_CACHED, hint="do it again" if kept else hint)
    with atomic_folder(output) as beside:
        shutil.copytree(place, beside, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)


def _compile_native(model: Source, output: Path, options: Options, as_json: bool) -> None:
    with show_status("reading the model", as_json) as say:
        compiled = native.compile(model.program(options).model, progress=say)
        compiled.save(output)
    size = sum(path.stat().st_size for path in output.iterdir())
    told = {"model": model.text, "engine": "native", "output": str(output), "bytes": size, **compiled.report.as_dict()}
    print_result(
        told, as_json, str(compiled.report), "", f"{output}  {decimal(size)}, for {compiled.processor.name} processors"
    )
