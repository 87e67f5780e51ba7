"""Channels last from the first convolution in lower precision to the last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from sardonyx.native import images
from sardonyx.optimize.optimizer import all_rules, optimize
from sardonyx.optimize.rules.channels_last import CHANNELS_LAST
from sardonyx.optimize.rules.images import IMAGES
from sardonyx.options import Options

_NEEDS = (CHANNELS_LAST, IMAGES)
_JOINS = frozenset(
    {
        *("JoinTransposes", "DropTranspose", "JoinReshapes", "DropReshape", "ShareCommon", "FoldConstant"),
        *("SinkTransposeThroughElementwise", "SinkTransposeThroughArithmetic"),
    }
)


def join_layouts(model: ir.Model, options: Options) -> Sequence[Path]:
    """Move Transposes around convolutions to where they vanish, in place; return the libraries of new operators."""
    names = _JOINS | {rule.name for rule in all_rules() if rule.needs in _NEEDS}
    optimize(model, domains=_NEEDS, names=names)
    used = any(node.domain == IMAGES for node in model.graph)
    return [images.build(options)] if used else []
