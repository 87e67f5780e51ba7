"""ONNX operators as loops, a family a module. Importing it fills the table."""

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
