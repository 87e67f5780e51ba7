"""Which layers of a model run in which precision."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from sardonyx.precision.storage import Storage

Type: TypeAlias = str
"""A precision of a layer: "float32", "bf16", "int8" or "int4"."""

FLOAT32 = "float32"
INTEGERS = frozenset({"int8", "int4"})
"""Precisions whose weights are integers with scales."""
MODEL = "the whole model"
"""The only layer of a plan for an engine that computes all of a model in one precision."""
FALLBACKS: Mapping[Type, Type] = {"int4": "int8", "int8": "bf16", "bf16": FLOAT32}
"""The next higher precision of each, the lowest first."""


@dataclass(frozen=True)
class Plan:
    """The precision of each layer, by its name; layers that are not named run in float32."""

    layers: Mapping[str, Type] = field(default_factory=dict)
    storages: Mapping[tuple[str, Type], Storage] = field(default_factory=dict, compare=False)
    """How weights are stored where their layers' activations decided, by layer and precision."""

    def type_of(self, layer: str) -> Type:
        """Return the precision of a layer."""
        return self.layers.get(layer, FLOAT32)

    def storage_of(self, layer: str) -> Storage | None:
        """Return how the weight of a layer is stored, if not as usual in its precision."""
        return self.storages.get((layer, self.type_of(layer)))

    def with_layer(self, layer: str, precision: Type) -> Plan:
        """Return the plan with another precision for one layer."""
        return replace(self, layers={**self.layers, layer: precision})

    @property
    def is_float32(self) -> bool:
        """Whether every layer runs in float32."""
        return all(precision == FLOAT32 for precision in self.layers.values())

    @property
    def lowest(self) -> Type:
        """The lowest precision of any layer."""
        return next((t for t in FALLBACKS if t in self.layers.values()), FLOAT32)

    def counts(self) -> Counter[Type]:
        """Return the number of layers by precision."""
        return Counter(self.layers.values())

    def to_json(self) -> str:
        """Return the plan as text."""
        return json.dumps(dict(self.layers), sort_keys=True)
