"""Choices of precision in the disk cache, with the weights that were rounded for them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sardonyx.cache.disk import default_cache
from sardonyx.options import Options
from sardonyx.precision.plan import Plan, Type
from sardonyx.precision.storage import Storage, stored
from sardonyx.telemetry.report import LayerPrecision, PrecisionChoice

log = logging.getLogger(__name__)

_FILE = "precision.json"


@dataclass(frozen=True)
class Chosen:
    """What is kept: the choice as reports show it, and the plan."""

    choice: PrecisionChoice
    plan: Plan


def cached_choice(key: str, options: Options) -> Chosen | None:
    """Return the choice of a key, if there is one that can be read."""
    cache = default_cache(options)
    folder = cache.get(key) if cache is not None else None
    if folder is None:
        return None
    try:
        return _read(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the cached choice of a precision cannot be read; measuring again: %s", error)
        return None


def cache_choice(key: str, chosen: Chosen, options: Options) -> None:
    """Keep a choice, if there is a cache."""
    cache = default_cache(options)
    if cache is not None:
        about = {"what": "choice", "precision": chosen.choice.wanted}
        cache.put(key, lambda folder: _write(chosen, folder), about)


def _write(chosen: Chosen, folder: Path) -> None:
    storages = []
    for number, layer in enumerate(chosen.plan.layers):
        storage = chosen.plan.storage_of(layer)
        if storage is not None:
            for name, tensor in storage.constants.items():
                np.save(_array_file(folder, number, name), tensor.numpy(), allow_pickle=False)
            names, precision = sorted(storage.constants), chosen.plan.type_of(layer)
            storages.append([number, layer, precision, storage.kind, dict(storage.settings), names])
    content = {"choice": asdict(chosen.choice), "storages": storages}
    (folder / _FILE).write_text(json.dumps(content), encoding="utf-8")


def _read(folder: Path) -> Chosen:
    content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    choice = _choice(content["choice"])
    layers = {row.layer: row.precision for row in choice.layers}
    return Chosen(choice, Plan(layers, dict(_storage(folder, *entry) for entry in content["storages"])))


def _choice(content: Mapping[str, Any]) -> PrecisionChoice:
    rows = tuple(LayerPrecision(**row) for row in content["layers"])
    return replace(PrecisionChoice(**{**content, "layers": rows}), remembered=True)


def _storage(
    folder: Path, number: int, layer: str, precision: Type, kind: str, settings: Mapping[str, Any], names: list[str]
) -> tuple[tuple[str, Type], Storage]:
    files = {name: _array_file(folder, number, name) for name in names}
    constants = {name: torch.from_numpy(np.load(file, allow_pickle=False)) for name, file in files.items()}
    return (layer, precision), stored(kind, settings, constants)


def _array_file(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number}.{name}.npy"
