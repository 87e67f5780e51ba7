"""A build as values: its recipe, the assumptions it makes, and the built model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx
import onnx_ir as ir

from sardonyx.capture.regions import Region
from sardonyx.engines.engine import Engine
from sardonyx.options import Options
from sardonyx.precision.plan import Plan
from sardonyx.run.binding import Binding
from sardonyx.telemetry.report import GraphReport, RegionReport
from sardonyx.translate.translator import Translation

TRAINING = ("forward", "backward")
"""Kinds of graphs of a training step."""
MODULE = "module"
"""The kind of the graph of a whole module, which `sardonyx.compile` calls."""
TRACE = "trace"
"""The kind of a graph whose every value is a result, to find the first that differs."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """What to build: a region of a graph, for an engine, with options."""

    region: Region
    kind: str
    """Of the graph: "inference", "forward", "backward", "module"."""
    engine: Engine
    options: Options
    graph_report: GraphReport
    report: RegionReport
    plan: Plan | None = None
    """The precision of each layer; None if it is not chosen yet."""
    translation: Translation | None = None
    """The translation made to check that ONNX can express the region; a build consumes it and changes it in place."""


@dataclass(frozen=True)
class Assumptions:
    """Which arguments of the region the model has as constants."""

    weights: frozenset[int] = frozenset()
    numbers: Mapping[int, float] = field(default_factory=dict)
    """The value of each number, by argument."""


@dataclass(frozen=True, eq=False)
class Built:
    """A model ready for the engine, without the data of its weights."""

    proto: onnx.ModelProto
    model: bytes
    graph: ir.Graph
    """The graph of the model, for its inputs and outputs."""
    binding: Binding
    libraries: tuple[str, ...]
    report: RegionReport


BuildFunction: TypeAlias = Callable[[Recipe, Assumptions], Built]
