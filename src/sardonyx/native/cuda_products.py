"""Matrix products on a GPU as nodes of our own library over cuBLASLt, see cuda_products.h.

A product takes its bias along, or the cast of its result to float32, which then is not rounded; products of the same
operand become one node that can run them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from sardonyx.native.partition import registration
from sardonyx.native.session import onnxruntime, register
from sardonyx.native.table import int_of
from sardonyx.options import Options
from sardonyx.sizes import Dims
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header

DOMAIN = "sardonyx.cuda"
_OPERATORS = {ir.DataType.FLOAT16: "ProductsFloat16", ir.DataType.BFLOAT16: "ProductsBfloat16"}
_TO_FLOAT32 = "ToFloat32"
"""The end of an operator's name that returns float32."""
_MOST_PRODUCTS = 4
"""Of one node, as in cuda_products.h."""
_MULTIPLE = 8
"""What sizes must be multiples of, so that every row is aligned."""


@dataclass(frozen=True)
class _Product:
    """A node that multiplies by a weight, and the node after it that adds a bias or casts to float32, if any."""

    node: ir.Node
    weight: ir.Value
    transposed: bool
    bias: ir.Value | None = None
    after: ir.Node | None = None

    @property
    def result(self) -> ir.Value:
        return (self.after or self.node).outputs[0]

    @property
    def nodes(self) -> list[ir.Node]:
        return [self.node, *([self.after] if self.after is not None else [])]

    @property
    def operator(self) -> str:
        """The name of the operator that computes it."""
        operand, result = self.node.inputs[0], self.result
        assert operand is not None
        assert operand.dtype is not None
        return _OPERATORS[operand.dtype] + (_TO_FLOAT32 if result.dtype == ir.DataType.FLOAT else "")


def use_cuda_products(model: ir.Model, options: Options) -> Path | None:
    """Replace the matrix products of a model in half precision, in place; return the library, None without products."""
    groups = list(_groups(model.graph))
    if not groups:
        return None
    library = _build(options)
    for group in groups:
        _replace(model.graph, group)
    model.graph.opset_imports[DOMAIN] = 1
    return library


def _build(options: Options) -> Path:
    """Return the library, checked to load."""
    headers = [read_header("sardonyx.toolchain", "ort.h"), read_header("sardonyx.native", "cuda_products.h")]
    operators = [f"products_{kind}{to}" for kind in ("half", "bfloat") for to in ("", "_to_float")]
    registered = registration(DOMAIN, operators)
    library = compiler.build_library("\n".join([*headers, registered]), options)
    register(onnxruntime().SessionOptions(), library)
    return library


def _groups(graph: ir.Graph) -> Iterator[Sequence[_Product]]:
    """Yield the products that become one node each: those of the same operand that return the same type."""
    by_operand: dict[tuple[ir.Value, str], list[_Product]] = {}
    for node in graph:
        product = _product(node)
        if product is not None and node.inputs[0] is not None:
            by_operand.setdefault((node.inputs[0], product.operator), []).append(product)
    for products in by_operand.values():
        for start in range(0, len(products), _MOST_PRODUCTS):
            yield products[start : start + _MOST_PRODUCTS]


def _product(node: ir.Node) -> _Product | None:
    """Return a node as a product of its first operand and a weight, if it is one that the library supports."""
    if node.domain or node.op_type not in ("Gemm", "MatMul"):
        return None
    x, weight, *rest = node.inputs
    if x is None or weight is None or x.dtype not in _OPERATORS or not _is_given(weight):
        return None
    dims, x_dims = _dims(weight), _dims(x)
    if len(dims) != 2 or len(x_dims) < 2 or not all(_is_multiple(size) for size in dims):
        return None
    if node.op_type == "Gemm" and not _is_plain_gemm(node):
        return None
    transposed = node.op_type == "Gemm" and bool(int_of(node, "transB", 0))
    bias = rest[0] if rest else None
    if bias is not None:
        return _Product(node, weight, transposed, bias) if _is_row(bias, node.outputs[0]) else None
    return _with_next(_Product(node, weight, transposed))


def _is_plain_gemm(node: ir.Node) -> bool:
    scales = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
    return not int_of(node, "transA", 0) and all(scale == 1 for scale in scales)


def _with_next(product: _Product) -> _Product:
    """Return the product with the bias that is added to its result, or its cast, if nothing else reads the result."""
    result = product.node.outputs[0]
    uses = list(result.uses())
    if len(uses) != 1 or result.is_graph_output():
        return product
    after = uses[0].node
    if after.domain or after.graph is not product.node.graph:
        return product
    if after.op_type == "Cast" and after.outputs[0].dtype == ir.DataType.FLOAT:
        return replace(product, after=after)
    if after.op_type != "Add":
        return product
    bias = next((x for x in after.inputs if x is not result and x is not None), None)
    if bias is None or not _is_row(bias, result) or _dims(after.outputs[0]) != _dims(result):
        return product
    return replace(product, bias=bias, after=after)


def _is_row(bias: ir.Value, result: ir.Value) -> bool:
    return _is_given(bias) and _dims(bias) == _dims(result)[-1:] and bias.dtype == result.dtype


def _is_given(x: ir.Value) -> bool:
    """Whether a value is there before any node runs."""
    return x.is_graph_input() or x.is_initializer()


def _dims(x: ir.Value) -> Dims:
    dims: Dims | None = x.meta.get("dims")
    return () if dims is None else dims


def _is_multiple(size: object) -> bool:
    return isinstance(size, int) and size > 0 and size % _MULTIPLE == 0


def _replace(graph: ir.Graph, group: Sequence[_Product]) -> None:
    """Replace the products of one operand by a node in the place of the first."""
    operand = group[0].node.inputs[0]
    assert operand is not None
    inputs = [operand]
    for product in group:
        inputs += [product.weight, *([product.bias] if product.bias is not None else [])]
    attributes = [
        ir.AttrInt64s("transposed", [int(product.transposed) for product in group]),
        ir.AttrInt64s("biased", [int(product.bias is not None) for product in group]),
    ]
    node = ir.Node(DOMAIN, group[0].operator, inputs, attributes, num_outputs=len(group))
    node.name = f"products_{group[0].node.name}"
    node.meta["fx"] = group[0].node.meta.get("fx")
    graph.insert_before(group[0].node, node)
    for product, new in zip(group, node.outputs, strict=True):
        old = product.result
        new.name, new.type, new.shape = old.name, old.type, old.shape
        new.meta.update(old.meta)
        old.name = f"{old.name}_replaced"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove([node for product in group for node in product.nodes], safe=True)
