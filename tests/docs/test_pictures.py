"""The pictures in the documents: the plot is what `make plots` draws, and all of them are self-contained SVG."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks import plot

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES = sorted(IMAGES.glob("*.svg"))


def test_the_committed_plot_is_what_make_plots_draws() -> None:
    assert plot.SPEED.read_text(encoding="utf-8") == plot.speed(), "run make plots"


@pytest.mark.parametrize("name", ["inference", "training"])
def test_the_plot_shows_every_model_and_names_machine_date_and_versions(name: str) -> None:
    drawn, found = plot.speed(), json.loads((plot.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert all(f">{model}</text>" in drawn for model in plot.seconds_by_model(found))
    for told in (found["date"][:10], found["cpu"], f"torch {found['versions']['torch']}"):
        assert told in drawn


def test_the_plot_lists_the_models_on_which_sardonyx_is_slower() -> None:
    (listed,) = re.findall(r"Slower than eager: (.+?)\.<", plot.speed())
    for name in ("inference", "training"):
        found = json.loads((plot.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for model, seconds in plot.seconds_by_model(found).items():
            ratio = seconds["eager"] / seconds["sardonyx"]
            assert (f"{model} ({ratio:.2f}×)" in listed) == (ratio < 1), model


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_self_contained_has_a_label_and_dark_colours(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).get("aria-label")
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text
    assert "url(http" not in text
