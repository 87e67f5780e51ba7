"""Engines that generate tokens from a folder of weights, each loaded in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from benchmarks.generate_models import is_encoder_decoder

Tokens: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True)
class Generated:
    """The new tokens of one call, a row for each prompt, and when each was there, in seconds since the call."""

    tokens: list[list[int]]
    seconds: list[float]


class Generator(Protocol):
    """A model that an engine has loaded."""

    def generate(self, prompt: Tokens, tokens: int) -> Generated:
        """Generate so many tokens greedily."""

    def details(self) -> dict[str, Any]:
        """What the engine has to tell of itself."""


@dataclass
class _Clock:
    """A streamer of transformers that records when each token arrives; the first `put` is the prompt."""

    started: float = field(default_factory=time.perf_counter)
    seconds: list[float] = field(default_factory=list)
    puts: int = 0

    def put(self, value: Any) -> None:
        """A token of each row is there."""
        self.puts += 1
        if self.puts > 1:
            self.seconds.append(time.perf_counter() - self.started)

    def end(self) -> None:
        """Nothing is left to write."""


@dataclass
class InTransformers:
    """A model with the `generate` of transformers."""

    model: Any

    def generate(self, prompt: Tokens, tokens: int) -> Generated:
        """Generate by greedy search."""
        ids, clock = torch.from_numpy(prompt), _Clock()
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.no_grad():
            made = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1, streamer=clock, **lengths
            )
        return Generated(made[:, -tokens:].tolist(), clock.seconds)

    def details(self) -> dict[str, Any]:
        """Sessions that were built, and what ran in torch, of a compiled module."""
        if not hasattr(self.model, "builds"):
            return {}
        precision, fallbacks = self.model.report.precision, self.model.report.fallbacks
        told = {} if precision is None else {"precision": str(precision).splitlines()[0]}
        builds = [build._asdict() for build in self.model.builds]
        return {"builds": builds, "fallbacks": [str(x) for x in fallbacks], **told}


def _loaded(folder: Path) -> Any:
    hf = import_module("transformers")
    auto = hf.AutoModelForSeq2SeqLM if is_encoder_decoder(folder) else hf.AutoModelForCausalLM
    return auto.from_pretrained(folder).eval()


def eager(folder: Path, exported: Path) -> InTransformers:
    """transformers as it is."""
    return InTransformers(_loaded(folder))


def sardonyx(folder: Path, exported: Path, **options: Any) -> InTransformers:
    """`sardonyx.compile(model)`; what would stay in torch is an error."""
    return InTransformers(import_module("sardonyx").compile(_loaded(folder), fallback="error", **options))


def torch_compile(folder: Path, exported: Path) -> InTransformers:
    """`torch.compile` of forward with our backend, and with all sizes dynamic."""
    import_module("sardonyx")
    model = _loaded(folder)
    model.forward = torch.compile(model.forward, backend="sardonyx", dynamic=True)
    return InTransformers(model)


def optimum(folder: Path, exported: Path) -> InTransformers:
    """optimum-onnx, with the files of `export_optimum`."""
    return InTransformers(_optimum_class(folder).from_pretrained(exported))


def export_optimum(folder: Path, exported: Path) -> None:
    """Export by optimum-onnx with its defaults."""
    _optimum_class(folder).from_pretrained(folder, export=True).save_pretrained(exported)


def _optimum_class(folder: Path) -> Any:
    module = import_module("optimum.onnxruntime")
    return module.ORTModelForSeq2SeqLM if is_encoder_decoder(folder) else module.ORTModelForCausalLM


@dataclass
class InGenai:
    """A model in onnxruntime-genai, with the buffers of its cache as long as the prompt and the new tokens."""

    model: Any

    def generate(self, prompt: Tokens, tokens: int) -> Generated:
        """Generate by greedy search."""
        genai, (batch, length) = import_module("onnxruntime_genai"), prompt.shape
        started, seconds = time.perf_counter(), []
        total = length + tokens
        params = genai.GeneratorParams(self.model)
        params.set_search_options(max_length=total, min_length=total, batch_size=batch, do_sample=False)
        generator = genai.Generator(self.model, params)
        generator.append_tokens(prompt.astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
            seconds.append(time.perf_counter() - started)
        rows = [generator.get_sequence(row)[length:].tolist() for row in range(batch)]
        return Generated(rows, seconds)

    def details(self) -> dict[str, Any]:
        """Nothing more is known."""
        return {}


def genai(folder: Path, exported: Path) -> InGenai:
    """onnxruntime-genai, with the files of `export_genai`."""
    return InGenai(import_module("onnxruntime_genai").Model(str(exported)))


def export_genai(folder: Path, exported: Path, precision: str) -> None:
    """Build by onnxruntime-genai's model builder with its defaults."""
    arguments = ["-i", folder, "-o", exported, "-p", precision, "-e", "cpu", "-c", exported / "cache"]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the model builder failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")


@dataclass(frozen=True)
class Engine:
    """How to load a model, and what has to be done before that."""

    load: Callable[[Path, Path], Generator]
    """From the folder of weights, and that of exported files."""
    export: Callable[[Path, Path], None] | None = None
    """Write what the engine reads; once for each model, in a process of its own."""
    peer: str = ""
    """The environment that has its packages; empty for this one."""
    packages: tuple[str, ...] = ()
    caches: bool = False
    """Whether a second process finds compiled sessions on disk."""


def _ours(**options: Any) -> Engine:
    return Engine(partial(sardonyx, **options), caches=True)


def _genai(precision: str) -> Engine:
    packages = ("onnxruntime-genai", "transformers")
    return Engine(genai, partial(export_genai, precision=precision), "genai", packages)


ENGINES: Mapping[str, Engine] = {
    "eager": Engine(eager),
    "sardonyx": _ours(),
    "sardonyx-int8": _ours(precision="int8", max_drop=0.1),
    "sardonyx-int4": _ours(precision="int4", max_drop=0.3),
    "sardonyx-native": _ours(native=True),
    "sardonyx-torch-compile": Engine(torch_compile),
    "optimum": Engine(optimum, export_optimum, "optimum", ("optimum-onnx", "onnxruntime", "transformers")),
    "genai": _genai("fp32"),
    "genai-int4": _genai("int4"),
}
"""Every engine by name, in the order they take turns; bounds of lower precision are those of `bench-precision`."""

ON_REQUEST = ("sardonyx-native", "sardonyx-torch-compile")
USUAL = tuple(name for name in ENGINES if name not in ON_REQUEST)
"""The engines measured unless others are asked for."""


def main(name: str, folder: str, exported: str) -> None:
    """Export a model for an engine, and say how long it took."""
    export = ENGINES[name].export
    assert export is not None
    started = time.perf_counter()
    export(Path(folder), Path(exported))
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main(*sys.argv[1:])
