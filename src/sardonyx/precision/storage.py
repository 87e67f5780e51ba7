"""How a layer is stored if not as usual: smoothed in int8, in four bits rounded by activations, with static scales."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from sardonyx.native.linear import PackedWeight, pack_int4, pack_int8, quantize_int4
from sardonyx.precision.rounding import nearest_int4
from sardonyx.precision.static_scales import Range


class WeightStorage(Protocol):
    """How a weight is packed."""

    kind: ClassVar[str]

    @property
    def method(self) -> str:
        """What reports call it."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """What is stored of it besides its settings."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Numbers and text, for the disk cache."""

    def pack(self, weight: torch.Tensor, contents: str = "") -> PackedWeight:
        """Return a weight of depth × columns, whose contents have this digest."""


@dataclass(frozen=True, eq=False)
class Smoothed:
    """In int8, with a number for each channel that multiplies x and divides the weight."""

    channels: torch.Tensor
    kind: ClassVar[str] = "smoothed"

    @property
    def method(self) -> str:
        """What reports call it."""
        return "smoothed"

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The channels' numbers."""
        return {"channels": self.channels}

    @property
    def settings(self) -> Mapping[str, Any]:
        """None."""
        return {}

    def pack(self, weight: torch.Tensor, contents: str = "") -> PackedWeight:
        """Return a weight of depth × columns in int8."""
        return pack_int8(weight, self.channels)


@dataclass(frozen=True)
class Nearest:
    """In four bits, in blocks of a given size, rounded to the nearest."""

    block: int
    method: ClassVar[str] = ""
    constants: ClassVar[Mapping[str, torch.Tensor]] = MappingProxyType({})
    kind: ClassVar[str] = "nearest"

    @property
    def settings(self) -> Mapping[str, Any]:
        """The size of blocks."""
        return {"block": self.block}

    def pack(self, weight: torch.Tensor, contents: str = "") -> PackedWeight:
        """Return a weight of depth × columns in four bits."""
        return pack_int4(quantize_int4(weight, self.block))


@dataclass(frozen=True, eq=False)
class Rounded:
    """In four bits, rounded by activations; a weight that was edited since is rounded to the nearest."""

    method: str
    contents: str
    """The digest of the weight that was rounded."""
    packed: PackedWeight
    kind: ClassVar[str] = "rounded"

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The packed weight."""
        return self.packed.constants

    @property
    def settings(self) -> Mapping[str, Any]:
        """All but the weight."""
        packed = self.packed
        sizes = {"depth": packed.depth, "columns": packed.columns, "block": packed.block}
        return {
            "method": self.method,
            "contents": self.contents,
            **sizes,
            "has_zero_points": packed.has_zero_points,
        }

    def pack(self, weight: torch.Tensor, contents: str = "") -> PackedWeight:
        """Return a weight of depth × columns in four bits."""
        if contents == self.contents:
            return self.packed
        round_weight = quantize_int4 if weight.is_meta else nearest_int4
        symmetric = not self.packed.has_zero_points
        return pack_int4(round_weight(weight.to(torch.float32), self.packed.block, symmetric=symmetric))


@dataclass(frozen=True)
class Static:
    """In int8 between QuantizeLinear and DequantizeLinear, with the ranges that values had."""

    x: Range
    result: Range
    kind: ClassVar[str] = "static"

    @property
    def method(self) -> str:
        """None: the weight is rounded to the nearest."""
        return ""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """None."""
        return {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The ranges."""
        return {"x": self.x, "result": self.result}


Storage: TypeAlias = WeightStorage | Static


def contents_of(weight: torch.Tensor) -> str:
    """Return the digest of a weight: its version counter does not show edits through `.data`."""
    data = weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data if weight.numel() else b""
    return hashlib.sha256(data).hexdigest()


def stored(kind: str, settings: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> Storage:
    """Return a storage from what the disk cache has of it."""
    if kind == Smoothed.kind:
        return Smoothed(constants["channels"])
    if kind == Nearest.kind:
        return Nearest(settings["block"])
    if kind == Static.kind:
        return Static(tuple(settings["x"]), tuple(settings["result"]))
    sizes = {name: settings[name] for name in ("depth", "columns", "block", "has_zero_points")}
    return Rounded(settings["method"], settings["contents"], PackedWeight(constants=constants, **sizes))
