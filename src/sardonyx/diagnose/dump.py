"""Numbered files of what the engine is given, each with its FX graph beside it."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from sardonyx.diagnose.source import annotate

log = logging.getLogger(__name__)


def dump(folder: str, kind: str, proto: onnx.ModelProto, graph: torch.fx.GraphModule) -> Path:
    """Write `NNN_kind.onnx` and `NNN_kind.txt`, NNN being the first number that is free. Weights stay in torch."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    path = _claim(root, kind)
    path.write_bytes(proto.SerializeToString())
    path.with_suffix(".txt").write_text(graph.print_readable(print_output=False))
    log.info("dumped %s", path)
    return path


def _claim(root: Path, kind: str) -> Path:
    for number in itertools.count():
        if any(root.glob(f"{number:03d}_*.onnx")):
            continue
        path = root / f"{number:03d}_{kind}.onnx"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue  # another process was faster
        return path
    raise AssertionError("unreachable")


def add_metadata(model: ir.Model) -> None:
    """Say of every node where it comes from."""
    for node in model.graph:
        annotate(node.metadata_props, node.meta.get("fx"))
