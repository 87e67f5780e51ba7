"""The figures of the page on performance, drawn from `benchmarks/results/` when the site is built."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plot import RESULTS, seconds_by_model

Numbers = Mapping[str, Mapping[str, float]]
"""For each row of a figure a number for each series."""

_INK = "#010203"
"""Stands for the colour of the page's text, light or dark."""
_LOOKS = (("o", "#d97706"), ("s", "#3b82f6"), ("^", "#16a34a"), ("D", "#c026d3"), ("v", "#64748b"))
"""Marker and colour of each series: they can be told apart on white, on black, and without colours."""


@dataclass(frozen=True)
class Plot:
    """What a figure shows, from which file, and how its numbers are found there."""

    file: str
    title: str
    axis: str
    numbers: Callable[[Any], Numbers]
    behind: str = ""
    """What is said of numbers beyond one on the losing side; nothing for numbers that are no ratios."""
    losing: Callable[[float], bool] = lambda ratio: ratio < 1


def figure(name: str) -> str:
    """A figure as HTML, without an empty line, which would end it in Markdown: drawing, source, and where we lose."""
    plot = PLOTS[name]
    found = json.loads((RESULTS / plot.file).read_text())
    numbers = plot.numbers(found)
    said = [f"{plot.title}. {_source(found)}, <code>benchmarks/results/{plot.file}</code>."]
    if plot.behind:
        said.append(_behind(plot, numbers))
    caption = "".join(f"<p>{text}</p>" for text in said)
    return f'<figure class="plot">{_svg(plot, numbers)}<figcaption>{caption}</figcaption></figure>'


def _source(found: Mapping[str, Any]) -> str:
    """When, where and with which versions it was measured."""
    shown = ("torch", "onnxruntime-gpu" if "gpu" in found else "onnxruntime", "transformers", "openvino")
    versions = [f"{name} {found['versions'][name]}" for name in shown if found["versions"].get(name)]
    machine = found["gpu"] if "gpu" in found else f"{found['cpu']}, {found['threads']} threads"
    return html.escape(", ".join([f"Measured {found['date'][:10]}", machine, *versions]))


def _behind(plot: Plot, numbers: Numbers) -> str:
    """The rows where another is faster, with the numbers."""
    lost = {
        row: [f"{series} {ratio:.2f}" for series, ratio in of_row.items() if plot.losing(round(ratio, 2))]
        for row, of_row in numbers.items()
    }
    rows = [f"{row} ({', '.join(found)})" for row, found in lost.items() if found]
    return html.escape(f"{plot.behind}: {'; '.join(rows)}." if rows else f"{plot.behind}: nowhere.")


def _svg(plot: Plot, numbers: Numbers) -> str:
    """The drawing: a row for each thing measured, a mark for each series, along a logarithmic axis."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    inks = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    style = {"svg.fonttype": "none", "svg.hashsalt": plot.file, "font.size": 8.5, **inks}
    series = list(dict.fromkeys(name for of_row in numbers.values() for name in of_row))
    with pyplot.rc_context(style):
        drawing, axes = pyplot.subplots(figsize=(4.8, 0.95 + 0.24 * len(numbers)), layout="constrained")
        for name, (marker, colour) in zip(series, _LOOKS, strict=False):
            rows = [row for row, of_row in enumerate(numbers.values()) if name in of_row]
            places = [of_row[name] for of_row in numbers.values() if name in of_row]
            axes.scatter(places, rows, marker=marker, color=colour, label=name, s=26, zorder=3)
        if plot.behind:
            axes.axvline(1, color=_INK, linewidth=0.9)
        axes.set(xscale="log", xlabel=plot.axis, yticks=range(len(numbers)), yticklabels=list(numbers))
        axes.set_ylim(len(numbers) - 0.4, -0.6)
        axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 1.5, 2, 3, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(color=_INK, alpha=0.15, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        drawing.legend(loc="outside upper center", ncols=3, frameon=False, handletextpad=0.2, columnspacing=1.0)
        written = io.StringIO()
        drawing.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(drawing)
    return _inline(written.getvalue(), plot)


def _inline(svg: str, plot: Plot) -> str:
    """As a part of a page, in its colour and font; names in it are the figure's own."""
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{Path(plot.file).stem}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(plot.title)}" ', 1)
    return "\n".join(line for line in svg.splitlines() if line.strip())


# What is in the files


def _against(base: str, names: Mapping[str, str]) -> Callable[[Any], Numbers]:
    """How many times as long as `base` each engine takes, model by model."""

    def numbers(found: Any) -> Numbers:
        return {
            model: {shown: of[name] / of[base] for name, shown in names.items() if name in of}
            for model, of in seconds_by_model(found).items()
        }

    return numbers


def _gpu(found: Any) -> Numbers:
    names = {"eager": "eager", "inductor": "inductor", "inductor reduce-overhead": "inductor, CUDA graphs"}
    seconds = {
        model: {engine: result["wall_seconds"] for engine, result in of["engines"].items()}
        for model, of in found["models"].items()
    }
    return {
        model: {shown: of[name] / of["sardonyx"] for name, shown in names.items() if name in of}
        for model, of in seconds.items()
    }


def _device(found: Any) -> Numbers:
    rows = found["executors"]["native"]["results"]
    return {
        row: {
            f"{executor} executor": median(of["results"][row]["ort"]) / median(of["results"][row]["cpu"])
            for executor, of in found["executors"].items()
        }
        for row in rows
    }


def _exports(found: Any) -> Numbers:
    seconds: dict[str, dict[str, float]] = {}
    for result in found["results"]:
        seconds.setdefault(result["case"], {})[result["exporter"]] = median(result["seconds"])
    return seconds


def _starts(found: Any) -> Numbers:
    shown = {"cold": "empty caches", "warm": "caches of an earlier process"}
    return {result["way"]: {name: median(result[key]) for key, name in shown.items()} for result in found["results"]}


def _regions(found: Any) -> Numbers:
    rows: dict[str, dict[str, float]] = {}
    for result in found["results"]:
        rows.setdefault(result["region"], {})[_THREADS[result["threads"]]] = result["ratio"]
    return rows


def _compiled(found: Any) -> Numbers:
    rows: dict[str, dict[str, float]] = {}
    for result in found["results"]:
        if result["threads"] == 2:
            rows.setdefault(result["model"], {})[_FORMS[result["form"]]] = result["ratio"]
    return rows


def _on_gpu(found: Any) -> Numbers:
    shown = {"ort": "ONNX Runtime", "inductor": "inductor"}
    return {of["region"]: {name: of["times"][key][0] for key, name in shown.items()} for of in found["results"]}


_FORMS = {"torch.onnx": "exported by torch.onnx", "sardonyx": "exported by sardonyx", "file": "a package's file"}
_THREADS = {1: "one thread", 2: "two threads"}
_NATIVE = "time without ÷ time with kernels: right of 1, kernels are faster"
_RATIO = "time ÷ sardonyx's: right of 1, sardonyx is faster"
_PEERS = {
    "eager": "eager",
    "inductor": "inductor",
    "onnxruntime": "export + ONNX Runtime",
    "openvino": "export + OpenVINO",
}
_ENGINES = {name: name for name in ("eager", "inductor", "onnxruntime", "openvino", "iree")}
PLOTS = {
    "inference": Plot(
        "inference.json", "Inference on the CPU, float32", _RATIO, _against("sardonyx", _PEERS), "Others are faster on"
    ),
    "training": Plot(
        "training.json", "A training step on the CPU", _RATIO, _against("sardonyx", _PEERS), "Others are faster on"
    ),
    "engines": Plot(
        "engines.json",
        "Engines, eager and inductor against engine='auto'",
        "time ÷ auto's: right of 1, auto is faster",
        _against("auto", _ENGINES),
        "Others are faster, by medians over all rounds, on",
    ),
    "gpu": Plot("gpu-h200.json", "Inference on a GPU, float16", _RATIO, _gpu, "Others are faster on"),
    "device": Plot(
        "eager.json",
        "The device ort against the CPU",
        "time ÷ the CPU's: left of 1, the device is faster",
        _device,
        "The CPU is faster on",
        lambda ratio: ratio > 1,
    ),
    "native": Plot("native.json", "Groups of operators as native kernels", _NATIVE, _regions, "Slower as kernels"),
    "native-models": Plot(
        "native-models.json", "Models with native kernels, two threads", _NATIVE, _compiled, "Slower with kernels"
    ),
    "native-gpu": Plot(
        "native-cuda-h200.json",
        "Groups of operators as native kernels on a GPU, float16, by the GPU's own clock",
        "time ÷ the native kernel's: right of 1, it is faster",
        _on_gpu,
        "Others are faster on",
    ),
    "export": Plot("export.json", "Exporting", "seconds", _exports),
    "startup": Plot("startup.json", "From a built BERT-base to its first result", "seconds", _starts),
}
"""The figures by name."""
