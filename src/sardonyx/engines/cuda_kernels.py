"""The kernels of ONNX Runtime's CUDA provider, which does not list them itself: the table in cuda_kernels.txt."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from sardonyx.optimize.legalize import KernelTypes

_NAMES = {"f32": "float", "f64": "double", "f16": "float16", "bf16": "bfloat16", "b": "bool"}
_KINDS = {"i": "int", "u": "uint", "f": "float"}


@cache
def table() -> dict[tuple[str, str], KernelTypes]:
    """Return the opsets and dtypes by operator, as `Kernels` has them."""
    text = files("sardonyx.engines").joinpath("cuda_kernels.txt").read_text(encoding="utf-8")
    kernels: dict[tuple[str, str], list[tuple[range, dict[str, list[str]]]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        operator, opsets, *constraints = line.split()
        first, last = map(int, opsets.split("-"))
        types = {name: [_type(t) for t in listed.split(",")] for name, _, listed in map(_partition, constraints)}
        kernels.setdefault(("", operator), []).append((range(first, last + 1), types))
    return dict(kernels)


def _partition(constraint: str) -> tuple[str, str, str]:
    return constraint.partition("=")


def _type(short: str) -> str:
    """Return ONNX's name of a tensor type from ours.

    >>> _type("i8"), _type("bf16"), _type("f8e5m2")
    ('tensor(int8)', 'tensor(bfloat16)', 'tensor(float8e5m2)')
    """
    return f"tensor({_NAMES.get(short) or re.sub('^[iuf]', lambda kind: _KINDS[kind[0]], short)})"
