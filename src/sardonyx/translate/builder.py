"""Build ONNX graphs: `g.Add(x, y)` appends a node and returns its output, with dtype and, if known, shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import sympy
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, Dims, Equality, dim_of
from sardonyx.translate import complex_as_real, inference, symbolic
from sardonyx.translate.random_inputs import RandomMode, RandomSource
from sardonyx.translate.size_table import SizeTable

Scalar: TypeAlias = int | float | bool
Operand: TypeAlias = "ir.Value | Scalar | sympy.Expr"

MICROSOFT = "com.microsoft"


class Builder:
    """Nodes, initializers and symbolic sizes of one graph under construction.

    Translations receive it as `g`. Capitalized attributes are ONNX operators; the rest are compositions that every
    family of translations needs.
    """

    def __init__(
        self, opset: int, tag: str = "", random_mode: RandomMode = "inputs", equal: Equality = operator.eq
    ) -> None:
        self.opset = opset
        self._tag = tag
        self._equal = equal
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.sizes = SizeTable(self)
        self.random = RandomSource(self, random_mode)
        self.out: Any = None
        """`meta["val"]` of the FX node being translated: what the translation must return."""
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._origin: Any = None
        self._count = 0
        self._reserved: set[str] = set()

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)

        def append(*inputs: ir.Value | None, **attributes: Any) -> ir.Value:
            return self.node(op_type, inputs, **attributes)

        return append

    def node(self, op_type: str, inputs: Sequence[ir.Value | None], **attributes: Any) -> ir.Value:
        """Append a node with one output.

        An attribute of None is omitted, so that ONNX's default applies. `domain` is the operator's, and `dtype` that of
        the output if it differs from that of the first input.
        """
        return self._append(op_type, inputs, 1, **attributes)[0]

    def several(
        self, op_type: str, outputs: int, inputs: Sequence[ir.Value | None], **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Append a node with several outputs."""
        return self._append(op_type, inputs, outputs, **attributes)

    def _append(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: int,
        *,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attributes: Any,
    ) -> tuple[ir.Value, ...]:
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        if op_type.startswith("Reduce"):
            inputs = self._axes_from_front(inputs)
        if dtype is not None and op_type == "Cast":
            attributes["to"], dtype = int(dtype), None
        attrs = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items() if v is not None]
        node = ir.Node(domain, op_type, inputs, attrs, num_outputs=outputs)
        inference.annotate(node, dtype, self._equal)
        return self._add(node)

    def _axes_from_front(self, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value | None]:
        """Count a reduction's constant axes from the front: ONNX Runtime ignores negative axes of an empty tensor."""
        x, axes = (*inputs, None)[:2]
        known = axes.const_value.numpy().tolist() if axes is not None and axes.const_value is not None else []
        if x is None or x.meta.get("dims") is None or not any(axis < 0 for axis in known):
            return inputs
        return [x, self.ints([axis % self.rank(x) for axis in known])]

    def custom_node(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        dtypes: Sequence[ir.DataType | None],
        version: int = 1,
    ) -> tuple[ir.Value, ...]:
        """Append a node of another domain, whose outputs have these types; `version` is that of the domain.

        A type of None is that of the operator being translated.
        """
        node = ir.Node(domain, op_type, inputs, attributes, num_outputs=len(dtypes), version=version)
        for value, dtype in zip(node.outputs, dtypes, strict=True):
            value.type = None if dtype is None else ir.TensorType(dtype)
        return self._add(node)

    def op(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node as torch.onnx's symbolic functions do: `g.op("mydomain::norm", x, epsilon_f=1e-5)`.

        The suffix is an attribute's type: f for a float, i for an int, s for a string and t for a tensor, or lists of
        them. A number among the inputs becomes a constant.
        """
        return symbolic.append(self, name, inputs, outputs, attributes)

    def _add(self, node: ir.Node) -> tuple[ir.Value, ...]:
        node.meta["fx"] = self._origin
        for value in node.outputs:
            value.name = self.fresh(node.op_type.lower())
        self.nodes.append(node)
        return tuple(node.outputs)

    def fresh(self, stem: str) -> str:
        """Return a name that is unused in the graph."""
        while True:
            self._count += 1
            name = f"{stem}_{self._tag}{self._count}"
            if name not in self._reserved:
                return name

    def reserve(self, names: Iterable[str]) -> None:
        """Reserve names of values that have their own, such as inputs, whose FX names look like ours."""
        self._reserved.update(names)

    @contextmanager
    def translating(self, node: torch.fx.Node) -> Iterator[None]:
        """Attribute appended nodes to the FX node; remove them if the translation fails."""
        outer = self._origin, self.out
        self._origin, self.out = node, node.meta.get("val")
        mark, drawn = len(self.nodes), len(self.random.inputs)
        try:
            yield
        except BaseException:
            del self.random.inputs[drawn:]
            for dropped in reversed(self.nodes[mark:]):
                dropped.resize_inputs(0)
            del self.nodes[mark:]
            self.sizes.forget(self.nodes)
            raise
        finally:
            self._origin, self.out = outer

    @contextmanager
    def body(self) -> Iterator[list[ir.Node]]:
        """Append nodes to a separate list, for a subgraph that can read values around it."""
        outer, drawn = self.nodes, len(self.random.inputs)
        self.nodes = []
        try:
            with self.sizes.scope():
                yield self.nodes
        finally:
            self.nodes = outer
        if len(self.random.inputs) > drawn:
            raise Unsupported("random numbers inside it: how many are drawn depends on control flow")

    def reads_output(self, index: int) -> bool:
        """Whether anything reads this output of the operator being translated."""
        return any(user.target is not operator.getitem or user.args[1] == index for user in self._origin.users)

    def operand(self, index: int) -> torch.Tensor:
        """Return FX's metadata of an operand of the operator being translated; it has strides, which ONNX has not."""
        described: torch.Tensor = self._origin.args[index].meta["val"]
        return described

    def operand_metadata(self) -> list[Any]:
        """Return FX's metadata of the tensors and symbolic numbers that the operator being translated reads."""
        return [source.meta.get("val") for source in self._origin.all_input_nodes]

    # Constants

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        """Return an initializer with the array; equal constants share one."""
        is_complex = np.iscomplexobj(array)
        if is_complex:  # numpy stores real and imaginary parts interleaved
            array = array.reshape(*array.shape, 1).view(array.real.dtype)
        tensor = ir.tensor(array, dtype=dtype)
        key = (f"{tensor.dtype}{' pairs' * is_complex}", tuple(array.shape), array.tobytes())
        if key not in self._constants:
            name = self.fresh("const")
            value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            tensor.name = name
            inference.set_dims(value, tuple(array.shape))
            self.initializers[name] = self._constants[key] = complex_as_real.mark(value) if is_complex else value
        return self._constants[key]

    def constant_on_demand(self, make: Callable[[], np.ndarray], dims: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """Return an initializer that is computed each time its value is read, and not stored."""
        name = self.fresh("const")
        tensor = ir.LazyTensor(lambda: ir.tensor(make(), name=name), dtype=dtype, shape=ir.Shape(dims), name=name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), const_value=tensor)
        inference.set_dims(value, dims)
        self.initializers[name] = value
        return value

    def constant_vector(self, value: Scalar, count: int, dtype: torch.dtype) -> ir.Value:
        """Return a constant vector of `count` equal numbers."""
        return self.constant(dtypes.to_array(torch.full((count,), value, dtype=dtype)), dtypes.to_onnx(dtype))

    def ints(self, values: Sequence[int]) -> ir.Value:
        """Return a constant one-dimensional int64 tensor."""
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: Operand, dtype: torch.dtype) -> ir.Value:
        """Return a number as a scalar tensor; a symbolic size is computed in the graph."""
        if isinstance(value, ir.Value):
            return self.cast(value, dtype)
        if isinstance(value, sympy.Expr):
            size = self.Squeeze(self.sizes.value(value), self.ints([0]))
            size.meta["dims"] = ()
            return self.cast(size, dtype)
        try:
            number = torch.tensor(value, dtype=dtype)
        except RuntimeError as error:  # torch wraps some out-of-range numbers, and raises for others
            raise Unsupported(f"{value} is not representable in dtype {dtype}") from error
        return self.constant(dtypes.to_array(number), dtypes.to_onnx(dtype))

    # Types and shapes

    def dims(self, x: ir.Value) -> Dims:
        """Return the sizes of a value: integers and symbolic expressions."""
        dims: Dims | None = x.meta.get("dims")
        if dims is None:
            raise Unsupported(f"the shape of {x.name} is not known")
        return dims

    def rank(self, x: ir.Value) -> int:
        """Return the number of dimensions of a value."""
        return len(self.dims(x))

    def dtype(self, x: ir.Value) -> torch.dtype:
        """Return the torch dtype of a value."""
        assert x.dtype is not None, x
        dtype = dtypes.to_torch(x.dtype)
        return dtype.to_complex() if complex_as_real.is_complex(x) else dtype

    def broadcast(self, *values: ir.Value, without: int = 0) -> Dims:
        """Return the sizes that values broadcast to, without the last axes of each."""
        shapes = [dims[: len(dims) - without] for dims in map(self.dims, values)]
        dims = inference.broadcast(*shapes, equal=self._equal)
        if dims is None:
            raise Unsupported(f"sizes {' and '.join(map(str, shapes))}, of which it is not known which is one")
        return dims

    def axis(self, x: ir.Value, dim: int) -> int:
        """Return a dimension counted from the front."""
        rank = max(self.rank(x), 1)
        return dim % rank

    def result_type(self, x: Operand, y: Operand) -> torch.dtype:
        """Return the dtype that torch promotes these operands to, computed by torch itself."""
        return torch.result_type(self._promotion_operand(x), self._promotion_operand(y))

    def _promotion_operand(self, operand: Operand) -> Any:
        if isinstance(operand, ir.Value):
            rank = self.rank(operand) - complex_as_real.is_complex(operand)
            return torch.empty((1,) * min(rank, 1), dtype=self.dtype(operand), device="meta")
        return 1 if isinstance(operand, sympy.Expr) else operand

    def cast(self, x: Operand, dtype: torch.dtype) -> ir.Value:
        """Return the operand as a tensor of `dtype`; without a node if it has that dtype."""
        if not isinstance(x, ir.Value):
            return self.scalar(x, dtype)
        if dtype.is_complex or complex_as_real.is_complex(x):
            return complex_as_real.cast(self, x, dtype)
        to = dtypes.to_onnx(dtype)
        if x.dtype == to:
            return x
        if x.name in self.initializers and x.const_value is not None and not self.rank(x):
            number = torch.tensor(x.const_value.numpy().item(), dtype=self.dtype(x))
            return self.scalar(number.to(dtype).item(), dtype)
        if (x.dtype, to) == (ir.DataType.DOUBLE, ir.DataType.UINT8):  # by int64, whose low bits torch takes
            x = self.Cast(x, dtype=ir.DataType.INT64)
        return self.Cast(x, dtype=to)

    def promote(self, x: Operand, y: Operand) -> list[ir.Value]:
        """Return the operands as tensors of the dtype that torch would compute in."""
        dtype = self.result_type(x, y)
        return [self.cast(x, dtype), self.cast(y, dtype)]

    def shape_value(self, dims: Sequence[Dim]) -> ir.Value:
        """Return sizes as a one-dimensional int64 tensor, constant if none is symbolic."""
        return self.sizes.vector(dims)

    # Compositions that every family needs

    def shaped(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Set the sizes of a new value."""
        inference.set_dims(x, tuple(dims))
        return x

    def reshape(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Reshape `x`; without a node if the sizes are the same."""
        dims = tuple(dims)
        if x.meta.get("dims") == dims:
            return x
        target, allowzero = self.sizes.reshape_target(x, dims)
        return self.shaped(self.Reshape(x, target, allowzero=1 if allowzero else None), dims)

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Permute axes; without a node for the identity."""
        if list(perm) == list(range(len(perm))):
            return x
        dims = self.dims(x)
        return self.shaped(self.Transpose(x, perm=list(perm)), [dims[axis] for axis in perm])

    def expand(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Broadcast to exactly these sizes; without a node if `x` has them."""
        dims = tuple(dims)
        if self.dims(x) == dims:
            return x
        return self.shaped(self.Expand(x, self.shape_value(dims)), dims)

    def unsqueeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Insert axes of size one at these positions of the result."""
        dims = list(self.dims(x))
        axes = sorted(axis % (len(dims) + len(axes)) for axis in axes)
        for axis in axes:
            dims.insert(axis, 1)
        return self.shaped(self.Unsqueeze(x, self.ints(axes)), dims) if axes else x

    def squeeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Remove axes of size one."""
        axes = sorted(self.axis(x, axis) for axis in axes)
        dims = [dim for i, dim in enumerate(self.dims(x)) if i not in axes]
        return self.shaped(self.Squeeze(x, self.ints(axes)), dims) if axes else x

    def slice(self, x: ir.Value, axis: int, start: Dim, end: Dim, step: int = 1) -> ir.Value:
        """`x[start:end:step]` along one axis; sizes may be symbolic, but not negative."""
        return self.Slice(x, *(self.shape_value([v]) for v in (start, end)), self.ints([axis]), self.ints([step]))

    def Pad(  # named like the operator, but handles axes
        self,
        x: ir.Value,
        amounts: ir.Value,
        fill: ir.Value | None = None,
        axes: ir.Value | None = None,
        mode: str | None = None,
    ) -> ir.Value:
        """Pad along `axes`, written for all axes: ONNX Runtime drops `axes` when it moves a Transpose past a Pad."""
        if axes is not None:
            assert axes.const_value is not None
            rank = self.rank(x)
            indices = [axis % rank + side for side in (0, rank) for axis in axes.const_value.numpy().tolist()]
            amounts = self.ScatterElements(self.ints([0] * (2 * rank)), self.ints(indices), amounts, axis=0)
        return self.node("Pad", [x, amounts, fill], mode=mode)

    def uniform(self, dims: Sequence[Dim], dtype: torch.dtype = torch.float32) -> ir.Value:
        """Return new random numbers, uniform in [0, 1)."""
        return self.random("uniform", tuple(dims), dtype)

    def normal(self, dims: Sequence[Dim], dtype: torch.dtype = torch.float32) -> ir.Value:
        """Return new random numbers of the standard normal distribution."""
        return self.random("normal", tuple(dims), dtype)

    def like(self, value: torch.Tensor) -> Dims:
        """Return the sizes of the ONNX value for a tensor in FX's metadata."""
        return complex_as_real.dims_of(value)

    def dim(self, size: Any) -> Dim:
        """Convert a size in FX's metadata to an integer or an expression."""
        return dim_of(size)
