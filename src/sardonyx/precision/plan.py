"""Which layers of a model run in which precision."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Type: TypeAlias = str
"""A precision of a layer: "float32", "bf16", "int8" or "int4"."""

FLOAT32 = "float32"
MODEL = "the whole model"
"""The only layer of a plan for an engine that computes all of a model in one precision."""
FALLBACKS: Mapping[Type, Type] = {"int4": "int8", "int8": "bf16", "bf16": FLOAT32}
"""The next higher precision of each."""


@dataclass(frozen=True)
class Plan:
    """The precision of each layer, by its name; layers that are not named run in float32."""

    layers: Mapping[str, Type] = field(default_factory=dict)

    def type_of(self, layer: str) -> Type:
        """Return the precision of a layer."""
        return self.layers.get(layer, FLOAT32)

    def with_layer(self, layer: str, precision: Type) -> Plan:
        """Return the plan with another precision for one layer."""
        return Plan({**self.layers, layer: precision})

    @property
    def is_float32(self) -> bool:
        """Whether every layer runs in float32."""
        return all(precision == FLOAT32 for precision in self.layers.values())

    def counts(self) -> Counter[Type]:
        """Return the number of layers by precision."""
        return Counter(self.layers.values())

    def to_json(self) -> str:
        """Return the plan as text."""
        return json.dumps(dict(self.layers), sort_keys=True)
