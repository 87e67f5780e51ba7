"""Custom operators declared in this process, and the libraries that a model using them needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx


class DeclaredOperator(Protocol):
    """An ONNX operator with kernels in a library, or composed of other operators."""

    @property
    def has_kernels(self) -> bool:
        """Whether models with this operator need a library."""

    @property
    def library(self) -> Path:
        """The library with this operator's kernels."""

    def library_with(self, others: Sequence[Any]) -> Path:
        """Return one library with the kernels of this and other operators."""


DECLARED: dict[tuple[str, str], DeclaredOperator] = {}
"""By ONNX domain and name."""


def is_declared(domain: str, name: str) -> bool:
    """Return whether an ONNX operator was declared here and has kernels."""
    return (domain, name) in DECLARED and DECLARED[domain, name].has_kernels


def libraries_of(model: bytes) -> list[Path]:
    """Return the libraries a serialized model needs: one per domain, since ONNX Runtime accepts only one."""
    if not DECLARED:
        return []
    proto = onnx.load_from_string(model)
    nodes = [*proto.graph.node, *(node for function in proto.functions for node in function.node)]
    used = sorted({key for key in _operators(nodes) if is_declared(*key)})
    domains = dict.fromkeys(domain for domain, _ in used)
    return [joint_library([DECLARED[key] for key in used if key[0] == domain]) for domain in domains]


def joint_library(operators: Sequence[DeclaredOperator]) -> Path:
    """Return one library with all of these operators."""
    first, *others = operators
    return first.library_with(others) if others else first.library


def _operators(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _operators(graph.node)
