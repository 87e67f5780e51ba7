"""Draw `docs/images/speed.svg` from the committed results: `make plots`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
SPEED = _ROOT / "docs" / "images" / "speed.svg"

_WIDTH, _MARGIN, _LABELS, _ROW, _BAR = 860, 24, 150, 32, 12
_AXIS = 3.5
"""The largest ratio that fits on the axis."""
_ENGINES = ("sardonyx", "inductor")
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.background { fill: #ffffff; stroke: #d1d9e0 }
.title { font-size: 17px; font-weight: 600 }
.heading { font-weight: 600 }
.note, .tick { fill: #59636e; font-size: 12px }
.faster, .slower { font-size: 12px; stroke: #ffffff; stroke-width: 3px; paint-order: stroke }
.slower { font-weight: 700; fill: #b3261e }
.grid { stroke: #d1d9e0 }
.eager { stroke: #1f2328; stroke-width: 1.5 }
.sardonyx { fill: #d97706 }
.inductor { fill: #8590a2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .background { fill: #0d1117; stroke: #3d444d }
  .note, .tick { fill: #9198a1 }
  .faster, .slower { stroke: #0d1117 }
  .slower { fill: #ff8a80 }
  .grid { stroke: #30363d }
  .eager { stroke: #e6edf3 }
}
"""
"""The background is opaque, so that text is readable whichever colours the page around the image has."""

Seconds = Mapping[str, Mapping[str, float]]
"""By model, then by engine."""


@dataclass(frozen=True)
class Panel:
    """One group of bars: a heading, and where and with what its models were measured."""

    heading: str
    source: str
    seconds: Seconds

    @classmethod
    def of(cls, heading: str, file: str) -> Panel:
        """Read a result file."""
        found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
        return cls(heading, f"{file}: {_source(found)}", seconds_by_model(found))

    @property
    def height(self) -> int:
        """The height in pixels, heading included."""
        return 40 + _ROW * len(self.seconds)


def seconds_by_model(found: Mapping[str, Any]) -> Seconds:
    """The median time of each engine for each model; engines that failed are left out.

    >>> result = {"model": "mlp", "engine": "eager", "seconds": 0.5, "failed": None}
    >>> seconds_by_model({"results": [result]})
    {'mlp': {'eager': 0.5}}
    """
    seconds: dict[str, dict[str, float]] = {}
    for result in found["results"]:
        if not result["failed"]:
            seconds.setdefault(result["model"], {})[result["engine"]] = result["seconds"]
    return seconds


def speed() -> str:
    """The SVG that compares sardonyx and inductor with eager."""
    panels = [
        Panel.of("Inference, float32", "inference.json"),
        Panel.of("Training step, float32", "training.json"),
    ]
    notes = [
        f"Slower than eager: {_slower(panels, 'eager')}.",
        f"Slower than inductor: {_slower(panels, 'inductor')}.",
        *(panel.source for panel in panels),
    ]
    top = 66
    height = top + sum(panel.height for panel in panels) + 56 + 19 * len(notes)
    lines = [*_title(), *_panels(panels, top), *_notes(notes, height)]
    return _document(height, "Speed of sardonyx and inductor relative to eager PyTorch", lines)


def _source(found: Mapping[str, Any]) -> str:
    rounds = max(len(result["round_seconds"]) for result in found["results"])
    packages = ", ".join(f"{name} {found['versions'][name]}" for name in ("torch", "onnxruntime", "transformers"))
    return f"{found['date'][:10]}, {found['cpu']}, {found['threads']} threads, {packages}; median of {rounds} rounds"


def _slower(panels: Sequence[Panel], other: str) -> str:
    """The models on which sardonyx is slower than another engine, with its relative speed."""
    ratios = {
        model: of[other] / of["sardonyx"]
        for panel in panels
        for model, of in panel.seconds.items()
        if {other, "sardonyx"} <= of.keys()
    }
    return ", ".join(f"{model} ({ratio:.2f}×)" for model, ratio in ratios.items() if ratio < 1) or "none"


def _title() -> Iterator[str]:
    yield _text(_MARGIN, 32, "Speed relative to eager PyTorch", "title")
    yield _text(_MARGIN, 52, "eager time ÷ engine time: higher is faster, eager = 1", "note")
    x = _WIDTH - _MARGIN - 190
    for engine in _ENGINES:
        yield f'<rect class="{engine}" x="{x}" y="22" width="12" height="12" rx="2"/>'
        yield _text(x + 18, 33, engine)
        x += 100


def _panels(panels: Sequence[Panel], top: int) -> Iterator[str]:
    bottom = top + sum(panel.height for panel in panels)
    for tenths in range(0, int(_AXIS * 10) + 1, 5):
        x = _x(tenths / 10)
        kind = "eager" if tenths == 10 else "grid"
        yield f'<line class="{kind}" x1="{x}" y1="{top + 28}" x2="{x}" y2="{bottom}"/>'
        yield _text(x, bottom + 18, f"{tenths / 10:g}×", "tick", "middle")
    for panel in panels:
        yield from _bars(panel, top)
        top += panel.height


def _bars(panel: Panel, top: int) -> Iterator[str]:
    yield _text(_MARGIN, top + 20, panel.heading, "heading")
    for row, (model, seconds) in enumerate(panel.seconds.items()):
        y = top + 34 + row * _ROW
        yield _text(_MARGIN + _LABELS - 10, y + 17, model, anchor="end")
        for place, engine in enumerate(_ENGINES):
            if engine in seconds:
                yield from _bar(engine, seconds["eager"] / seconds[engine], y + place * (_BAR + 1))


def _bar(engine: str, ratio: float, y: int) -> Iterator[str]:
    x, end = _x(0), _x(min(ratio, _AXIS))
    yield f'<rect class="{engine}" x="{x}" y="{y}" width="{end - x}" height="{_BAR}"/>'
    yield _text(end + 5, y + 10, f"{ratio:.2f}", "slower" if round(ratio, 2) < 1 else "faster")


def _notes(notes: Sequence[str], height: int) -> Iterator[str]:
    for line, note in enumerate(reversed(notes)):
        yield _text(_MARGIN, height - 16 - 19 * line, note, "note")


def _x(ratio: float) -> int:
    left, right = _MARGIN + _LABELS, _WIDTH - _MARGIN - 36
    return round(left + (right - left) * ratio / _AXIS)


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "") -> str:
    kind = f' class="{kind}"' if kind else ""
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}"{kind}{anchor}>{escape(text)}</text>'


def _document(height: int, label: str, lines: Sequence[str]) -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
    background = f'<rect class="background" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join([start, f"<style>{_STYLE}</style>", background, *lines, "</svg>", ""])


if __name__ == "__main__":
    SPEED.write_text(speed(), encoding="utf-8")
    print(f"wrote {SPEED.relative_to(_ROOT)}")
