"""Matrix products on a GPU as nodes of our own library over cuBLASLt, see cuda_products.h.

A product takes its bias and a residual along, and products of the same operand become one node that can run them side
by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from sardonyx.errors import SardonyxError
from sardonyx.native.cost import elements_of
from sardonyx.native.cuda_skip_norms import bias_of, is_skip_norm, split_skip_norm
from sardonyx.native.partition import registration, replace_value
from sardonyx.native.session import onnxruntime, register
from sardonyx.native.table import int_of
from sardonyx.native.targets import target_for
from sardonyx.options import Options
from sardonyx.sizes import Dims
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header

DOMAIN = "sardonyx.cuda"
_OPERATORS = {ir.DataType.FLOAT16: "ProductsFloat16", ir.DataType.BFLOAT16: "ProductsBfloat16"}
_MOST_PRODUCTS = 4
"""Of one node, as in cuda_products.h."""
_MULTIPLE = 8
"""What sizes must be multiples of, so that every row is aligned."""


@dataclass(frozen=True)
class _Product:
    """A node that multiplies by a weight, and the nodes that add a bias and a residual, if any; a Gemm adds either."""

    node: ir.Node
    weight: ir.Value
    transposed: bool
    bias: ir.Value | None = None
    bias_addition: ir.Node | None = None
    residual_addition: ir.Node | None = None

    @property
    def residual(self) -> ir.Value | None:
        """Read from its node: if it is the result of another product, that may have been replaced."""
        if self.residual_addition is None:
            return None
        if self.residual_addition is self.node:
            return self.node.inputs[2]
        biased = (self.bias_addition or self.node).outputs[0]
        return _other_addend(self.residual_addition, biased)

    @property
    def nodes(self) -> list[ir.Node]:
        nodes = (self.node, self.bias_addition, self.residual_addition)
        return [x for x in dict.fromkeys(nodes) if x is not None]

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]

    @property
    def inputs(self) -> list[ir.Value]:
        """What the library reads of it besides the first operand."""
        return [x for x in (self.weight, self.bias, self.residual) if x is not None]


def use_cuda_products(model: ir.Model, options: Options, *, kernels: bool) -> Path | None:
    """Replace the matrix products of a model in half precision, in place; return the library, None without products.

    With `kernels`, native ones will compute norms: a product then takes along the residual of the norm behind it too.
    """
    if next(_products(model.graph), None) is None:
        return None
    library = _build(options)
    if kernels and _has_compiler():
        _split_norms(model.graph, target_for("cuda").min_elements if options.native == "auto" else 0)
    for group in list(_groups(model.graph)):
        _replace(model.graph, group)
    model.graph.opset_imports[DOMAIN] = 1
    return library


def _has_compiler() -> bool:
    """Whether native kernels for a GPU can be compiled."""
    try:
        target_for("cuda").compiler_version()
    except SardonyxError:
        return False
    return True


def _build(options: Options) -> Path:
    """Return the library, checked to load."""
    library = compiler.build_library(library_source(), options)
    register(onnxruntime().SessionOptions(), library)
    return library


def library_source() -> str:
    """Return the C++ source of the library."""
    headers = [read_header("sardonyx.toolchain", "ort.h"), read_header("sardonyx.native", "cuda_products.h")]
    return "\n".join([*headers, registration(DOMAIN, ["products_half", "products_bfloat"])])


def _groups(graph: ir.Graph) -> Iterator[Sequence[_Product]]:
    """Yield the products that become one node each: those of the same operand, and each that adds a residual."""
    by_operand: dict[ir.Value | None, list[_Product]] = {}
    additions: set[ir.Node] = set()
    for product in _products(graph):
        addition = _residual_addition(product)
        if addition is None or addition in additions:  # a sum of two products is added by one of them
            by_operand.setdefault(product.node.inputs[0], []).append(product)
        else:
            additions.add(addition)
            yield [replace(product, residual_addition=addition)]
    for products in by_operand.values():
        for start in range(0, len(products), _MOST_PRODUCTS):
            yield products[start : start + _MOST_PRODUCTS]


def _products(graph: ir.Graph) -> Iterator[_Product]:
    """Yield the products that the library supports, with their biases."""
    for node in graph:
        product = _product(node)
        if product is not None:
            yield product if product.bias is not None or product.residual is not None else _with_bias(product)


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
    product, addend = _Product(node, weight, transposed), rest[0] if rest else None
    if addend is None:
        return product
    if _is_row(addend, node.outputs[0]):
        return replace(product, bias=addend)
    return replace(product, residual_addition=node) if _is_like(addend, node.outputs[0]) else None


def _is_plain_gemm(node: ir.Node) -> bool:
    scales = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
    return not int_of(node, "transA", 0) and all(scale == 1 for scale in scales)


def _with_bias(product: _Product) -> _Product:
    """Return the product with the bias that is added to its result, if nothing else reads the result."""
    result, add = product.result, _addition(product.result)
    bias = _other_addend(add, result) if add is not None else None
    if bias is None or not _is_row(bias, result):
        return product
    return replace(product, bias=bias, bias_addition=add)


def _residual_addition(product: _Product) -> ir.Node | None:
    """Return the node that adds a value of the same shape to the result, if nothing else reads the result."""
    if product.residual_addition is not None:
        return product.residual_addition
    result, add = product.result, _addition(product.result)
    residual = _other_addend(add, result) if add is not None else None
    return add if residual is not None and _is_like(residual, result) else None


def _addition(result: ir.Value) -> ir.Node | None:
    """Return the addition of the same shape that alone reads a value."""
    reader = _only_reader(result)
    if reader is None or reader.domain or reader.op_type != "Add" or _dims(reader.outputs[0]) != _dims(result):
        return None
    return reader


def _only_reader(result: ir.Value) -> ir.Node | None:
    """Return the node of the same graph that alone reads a value."""
    uses, producer = list(result.uses()), result.producer()
    if len(uses) != 1 or result.is_graph_output() or producer is None or uses[0].node.graph is not producer.graph:
        return None
    return uses[0].node


def _other_addend(node: ir.Node, addend: ir.Value) -> ir.Value | None:
    return next((x for x in node.inputs[:2] if x is not addend), None)


def _is_like(x: ir.Value, result: ir.Value) -> bool:
    return len(_dims(x)) > 1 and _dims(x) == _dims(result) and x.dtype == result.dtype


def _is_row(bias: ir.Value, result: ir.Value) -> bool:
    return _is_given(bias) and _dims(bias) == _dims(result)[-1:] and bias.dtype == result.dtype


def _split_norms(graph: ir.Graph, min_elements: int) -> None:
    """Split norms of a product and a residual, which the product then adds, if native kernels compute plain norms."""
    for product in list(_products(graph)):
        norm = _only_reader(product.result)
        if norm is not None and _takes_addends(product, norm) and elements_of(norm.outputs[0]) >= min_elements:
            split_skip_norm(graph, norm, product.result)


def _takes_addends(product: _Product, norm: ir.Node) -> bool:
    """Whether a node is a norm, and a product can add what the norm adds to its result."""
    if not is_skip_norm(norm) or product.residual is not None:
        return False
    bias, residual = bias_of(norm), _other_addend(norm, product.result)
    takes_bias = bias is None or (product.bias is None and _is_row(bias, product.result))
    return takes_bias and residual is not None and _is_like(residual, product.result)


def _is_given(x: ir.Value) -> bool:
    """Whether a value is there before any node runs."""
    return x.is_graph_input() or x.is_initializer()


def _dims(x: ir.Value) -> Dims:
    dims: Dims | None = x.meta.get("dims")
    return () if dims is None else dims


def _is_multiple(size: object) -> bool:
    return isinstance(size, int) and size > 0 and size % _MULTIPLE == 0


def _replace(graph: ir.Graph, group: Sequence[_Product]) -> None:
    """Replace the products of one operand by a node in the place of the first, or of its residual's addition."""
    operand = group[0].node.inputs[0]
    assert operand is not None
    assert operand.dtype is not None
    inputs = [operand, *(x for product in group for x in product.inputs)]
    attributes = [
        ir.AttrInt64s("transposed", [int(product.transposed) for product in group]),
        ir.AttrInt64s("biased", [int(product.bias is not None) for product in group]),
        ir.AttrInt64s("added", [int(product.residual is not None) for product in group]),
    ]
    node = ir.Node(DOMAIN, _OPERATORS[operand.dtype], inputs, attributes, num_outputs=len(group))
    node.name = f"products_{group[0].node.name}"
    node.meta["fx"] = group[0].node.meta.get("fx")
    graph.insert_before(group[0].residual_addition or group[0].node, node)
    for product, new in zip(group, node.outputs, strict=True):
        replace_value(product.result, new)
    graph.remove([node for product in group for node in product.nodes], safe=True)
