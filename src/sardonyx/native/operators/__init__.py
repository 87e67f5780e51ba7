"""Lowerings of ONNX operators, one module per family. Importing it fills the table."""

from sardonyx.native.operators import (
    activations,
    attention,
    einsum,
    elementwise,
    indexing,
    layout,
    norms,
    pooling,
    products,
    reductions,
)

__all__ = [
    "activations",
    "attention",
    "einsum",
    "elementwise",
    "indexing",
    "layout",
    "norms",
    "pooling",
    "products",
    "reductions",
]
