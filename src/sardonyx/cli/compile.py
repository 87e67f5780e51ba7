"""`sardonyx compile`: compile a model for an engine ahead of its first call, or to native code."""

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
from sardonyx.cli._messages import example, print_result, show_status
from sardonyx.cli._output import OutputFolder, atomic_folder
from sardonyx.cli._parameters import as_json, engine_options, input_options, model_argument, precision_options
from sardonyx.cli._source import Inputs, Source
from sardonyx.engines import find
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.options import Options
from sardonyx.telemetry.text import duration

_NOT_CACHED = "nothing was cached on disk: the cache is disabled, or cannot be written"
_AMBIGUOUS = "another process used the cache meanwhile, so that the compiled artifact cannot be identified"
_COARSE = 0.1
"""Seconds by which a file system's clock may lag."""


@click.command(
    epilog=example(
        "sardonyx compile model.onnx --native -o compiled",
        "sardonyx compile examples/models.py:bert --engine openvino",
        "sardonyx compile examples/models.py:bert --engine iree -o artifact",
    )
)
@model_argument
@click.option("-o", "--output", type=OutputFolder(), help="A folder for the compiled artifact.")
@click.option("--native", "natively", is_flag=True, help="Compile to native code, as `sardonyx native compile`.")
@input_options
@engine_options
@precision_options
@as_json
def command(
    model: Source,
    output: Path | None,
    natively: bool,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Compile a model for an engine, which then loads it from the cache, or to native code.

    Compiled artifacts go to the disk cache, and with -o are copied to a folder. The model is called once.
    """
    if output is not None and output.exists():
        raise SardonyxError(f"{output} already exists", hint="choose another folder, or remove it")
    if natively:
        folder = output or OutputFolder(over=MANIFEST).convert(f"{model.name}-native", None, None)
        _compile_native(model, folder, inputs, options, as_json)
        return
    engine = find(options.engine)
    has_artifacts = engine.identity(options) is not None
    if output is not None and not has_artifacts:
        raise OptionError(
            f"the engine {engine.name!r} prepares a model at each start, and has no artifacts to save",
            hint="--native compiles for onnxruntime; `sardonyx export` and `sardonyx optimize` write the model",
        )
    with show_status(f"compiling with {engine.name}", as_json), torch.no_grad():
        exported, rest = model.lowered(inputs, options)
        program, feeds = model.as_file(exported, inputs, rest, optimize="none")
        started, then = time.perf_counter(), time.time()
        program(*feeds.values())
        seconds = time.perf_counter() - started
    used = _used_entries(options, then) if has_artifacts else []
    entry = used[0] if len(used) == 1 else None
    cached = _entry_folder(options, entry)
    if output is not None:
        _copy_artifact(cached, output, used)
    result = {
        "model": model.text,
        "engine": engine.name,
        "seconds": seconds,
        "cache_key": entry.key if entry else None,
        "cached": cached and str(cached),
        "bytes": entry.bytes if entry else 0,
        "output": output and str(output),
    }
    print_result(result, as_json, *_lines(result, has_artifacts, used))


def _lines(result: dict[str, Any], has_artifacts: bool, used: list[Entry]) -> list[str]:
    ready = f"{result['engine']} is ready, and was called, after {duration(result['seconds'])}"
    if result["cached"] is None and has_artifacts:
        return [ready, _AMBIGUOUS if used else _NOT_CACHED]
    if result["cached"] is None:
        return [ready, f"{result['engine']} has no artifacts on disk: it prepares the model at each start"]
    lines = [ready, f"{result['cached']}  {decimal(result['bytes'])}, for the next process"]
    return lines + ([f"{result['output']}  a copy"] if result["output"] else [])


def _used_entries(options: Options, since: float) -> list[Entry]:
    """Return the cache entries of the engine that were used since a time; several if another process used some."""
    cache = default_cache(options)
    entries = cache.entries() if cache else []
    about = {"what": "artifact", "engine": options.engine}
    return [x for x in entries if x.bytes and x.used > since - _COARSE and about.items() <= x.about.items()]


def _entry_folder(options: Options, entry: Entry | None) -> Path | None:
    cache = default_cache(options)
    return cache.get(entry.key) if cache and entry else None


def _copy_artifact(cached: Path | None, output: Path, used: list[Entry]) -> None:
    if cached is None:
        hint = "set SARDONYX_CACHE_DIR to a folder that can be written"
        raise SardonyxError(_AMBIGUOUS if used else _NOT_CACHED, hint="try again" if used else hint)
    with atomic_folder(output) as temporary:
        shutil.copytree(cached, temporary, ignore=shutil.ignore_patterns(MANIFEST), dirs_exist_ok=True)


def _compile_native(model: Source, output: Path, inputs: Inputs, options: Options, as_json: bool) -> None:
    with show_status("reading the model", as_json) as say, torch.no_grad():
        lowered, rest = model.lowered(inputs, options)
        if rest.precision != "float32":
            program, _ = model.as_file(lowered, inputs, rest, optimize="none")
            lowered = program.model
        compiled = native.compile(lowered, progress=say)
        compiled.save(output)
    size = sum(path.stat().st_size for path in output.iterdir())
    result = {
        "model": model.text,
        "engine": "native",
        "output": str(output),
        "bytes": size,
        **compiled.report.as_dict(),
    }
    print_result(
        result,
        as_json,
        str(compiled.report),
        "",
        f"{output}  {decimal(size)}, for {compiled.processor.name} processors",
    )
