"""Custom operators that are declared in this process, and the libraries that a model with them needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import onnx


class DeclaredOperator(Protocol):
    """An operator of ONNX that has kernels in a library, or is a composition of other operators."""

    @property
    def has_kernels(self) -> bool:
        """Whether models with it need a library."""

    @property
    def library(self) -> Path:
        """The library that has its kernels."""

    def library_with(self, others: Sequence[Any]) -> Path:
        """One library with its kernels and those of other operators."""


DECLARED: dict[tuple[str, str], DeclaredOperator] = {}
"""By domain and name in ONNX."""


def is_declared(domain: str, name: str) -> bool:
    """Whether this is an operator of ONNX that was declared here, and has kernels."""
    return (domain, name) in DECLARED and DECLARED[domain, name].has_kernels


def libraries_of(model: bytes) -> list[Path]:
    """The libraries that a serialised model needs: one for each domain, as ONNX Runtime takes no two for one."""
    if not DECLARED:
        return []
    read = onnx.load_from_string(model)
    nodes = [*read.graph.node, *(node for function in read.functions for node in function.node)]
    used = sorted({key for key in _operators(nodes) if is_declared(*key)})
    domains = dict.fromkeys(domain for domain, _ in used)
    return [joint_library([DECLARED[key] for key in used if key[0] == domain]) for domain in domains]


def joint_library(operators: Sequence[DeclaredOperator]) -> Path:
    """One library with all of these operators."""
    first, *others = operators
    return first.library_with(others) if others else first.library


def _operators(nodes: Iterable[onnx.NodeProto]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _operators(graph.node)
