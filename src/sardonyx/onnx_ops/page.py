"""Update the table of operators in the documentation: `python -m sardonyx.onnx_ops.page docs/onnx-operators.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sardonyx.engines.registry import find
from sardonyx.onnx_ops.schemas import MICROSOFT, Operator, operators, opset

_TABLE = re.compile(r"(?<=<!-- operators -->\n).*?(?=\n<!-- /operators -->)", re.DOTALL)


def versions_used() -> str:
    """Return the versions that the table depends on."""
    version = ".".join(str(find("onnxruntime").probe().version).split(".")[:2])
    return f"onnxruntime {version}, opset {opset()}"


def update_page(text: str) -> str:
    """Return the page with its table regenerated."""
    return _TABLE.sub(lambda _: "\n".join(_lines()), text)


def _lines() -> Iterator[str]:
    yield f"{len(operators())} operators, as {versions_used()} has them."
    for domain, title in (("", "ONNX's own"), (MICROSOFT, f"Those of `{MICROSOFT}`")):
        yield f"\n### {title}\n"
        yield "| ONNX | since | `torch.ops.ort.` | with `outputs=` |"
        yield "|---|---|---|---|"
        yield from (_row(x) for x in operators() if x.domain == domain)


def _row(x: Operator) -> str:
    more = ", ".join(f"{i} {t.name}" for i, t in enumerate(x.outputs)) if len(x.overloads()) > 1 else ""
    return f"| {x.op_type} | {x.version} | `{x.schema()}` | {more} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(update_page(path.read_text(encoding="utf-8")), encoding="utf-8")
