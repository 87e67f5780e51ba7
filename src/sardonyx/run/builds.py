"""A build as values: what is built, what it takes for constant, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx
import onnx_ir as ir

from sardonyx.capture.regions import Region
from sardonyx.engines.engine import Engine
from sardonyx.options import Options
from sardonyx.run.binding import Binding
from sardonyx.telemetry.report import GraphReport, RegionReport
from sardonyx.translate.translator import Translation


@dataclass(frozen=True, eq=False)
class Recipe:
    """What is built: a region of a graph, for an engine, with options."""

    region: Region
    kind: str
    """Of the graph: "inference", "forward", "backward", "module"."""
    engine: Engine
    options: Options
    graph_report: GraphReport
    report: RegionReport
    translation: Translation | None = None
    """One that was made already, to see whether ONNX can express the region; a build takes it over and changes it."""


@dataclass(frozen=True)
class Assumptions:
    """Which arguments of the region are constants of the model."""

    weights: frozenset[int] = frozenset()
    numbers: Mapping[int, float] = field(default_factory=dict)
    """Numbers by value."""


@dataclass(frozen=True, eq=False)
class Built:
    """A model ready for the engine, before its weights are given."""

    proto: onnx.ModelProto
    model: bytes
    graph: ir.Graph
    """Whose inputs and outputs the model has."""
    binding: Binding
    libraries: tuple[str, ...]
    report: RegionReport


BuildFunction: TypeAlias = Callable[[Recipe, Assumptions], Built]
