"""Builds ONNX graphs: `g.Add(x, y)` appends a node and returns its output, typed and, where known, shaped."""

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
from sardonyx.sizes import Dim, Dims, dim_of
from sardonyx.translate import inference, pairs, symbolic
from sardonyx.translate.noise import Noise, Source
from sardonyx.translate.size_table import SizeTable

Scalar: TypeAlias = int | float | bool
Operand: TypeAlias = "ir.Value | Scalar | sympy.Expr"

MICROSOFT = "com.microsoft"


class Builder:
    """Nodes, initializers and the meaning of symbolic sizes of one graph under construction.

    Translations receive it as `g`. Capitalised attributes are ONNX operators; the rest are the few
    compositions every family needs.
    """

    def __init__(self, opset: int, tag: str = "", noise: Source = "inputs") -> None:
        self.opset = opset
        self._tag = tag
        self.nodes: list[ir.Node] = []
        self.initializers: dict[str, ir.Value] = {}
        self.sizes = SizeTable(self)
        self.noise = Noise(self, noise)
        self.out: Any = None
        """`meta["val"]` of the FX node being translated: what the translation must produce."""
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
        """Append a node of one output.

        An attribute of None is left out, which is how ONNX writes a default. `domain` is the operator's, and `dtype`
        the type of the output where it is not that of the first input.
        """
        return self._append(op_type, inputs, 1, **attributes)[0]

    def several(
        self, op_type: str, outputs: int, inputs: Sequence[ir.Value | None], **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Append a node of several outputs."""
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
        inference.annotate(node, dtype)
        return self._add(node)

    def _axes_from_front(self, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value | None]:
        """A reduction's inputs, its axes counted from the front: ONNX Runtime ignores others of an empty tensor."""
        x, axes = (*inputs, None)[:2]
        known = axes.const_value.numpy().tolist() if axes is not None and axes.const_value is not None else []
        if x is None or x.meta.get("dims") is None or not any(axis < 0 for axis in known):
            return inputs
        return [x, self.ints([axis % self.rank(x) for axis in known])]

    def foreign(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        dtypes: Sequence[ir.DataType | None],
        version: int = 1,
    ) -> tuple[ir.Value, ...]:
        """Append a node that ONNX does not know, whose outputs have these types; `version` is its domain's.

        A type that is None is that of the operator being translated.
        """
        node = ir.Node(domain, op_type, inputs, attributes, num_outputs=len(dtypes), version=version)
        for value, dtype in zip(node.outputs, dtypes, strict=True):
            value.type = None if dtype is None else ir.TensorType(dtype)
        return self._add(node)

    def op(self, name: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        """Append a node as torch.onnx's symbolic functions do: `g.op("mydomain::norm", x, epsilon_f=1e-5)`.

        The suffix says an attribute's type: f for a float, i for an int, s for a string and t for a tensor; a list is
        of that type. A number among the inputs is a constant.
        """
        return symbolic.append(self, name, inputs, outputs, attributes)

    def _add(self, node: ir.Node) -> tuple[ir.Value, ...]:
        node.meta["fx"] = self._origin
        for value in node.outputs:
            value.name = self.fresh(node.op_type.lower())
        self.nodes.append(node)
        return tuple(node.outputs)

    def fresh(self, stem: str) -> str:
        """A name nothing else in the graph has."""
        while True:
            self._count += 1
            name = f"{stem}_{self._tag}{self._count}"
            if name not in self._reserved:
                return name

    def reserve(self, names: Iterable[str]) -> None:
        """Keep names for values that bring their own, as inputs do: FX's look like ours."""
        self._reserved.update(names)

    @contextmanager
    def translating(self, node: torch.fx.Node) -> Iterator[None]:
        """While active, what is appended stems from the FX node; undone if the translation fails."""
        around = self._origin, self.out
        self._origin, self.out = node, node.meta.get("val")
        mark, drawn = len(self.nodes), len(self.noise.draws)
        try:
            yield
        except BaseException:
            del self.noise.draws[drawn:]
            for dropped in reversed(self.nodes[mark:]):
                dropped.resize_inputs(0)
            del self.nodes[mark:]
            self.sizes.forget(self.nodes)
            raise
        finally:
            self._origin, self.out = around

    @contextmanager
    def body(self) -> Iterator[list[ir.Node]]:
        """While active, nodes are appended to a list of their own: a subgraph's, which sees what is around it."""
        around, drawn = self.nodes, len(self.noise.draws)
        self.nodes = []
        try:
            with self.sizes.scope():
                yield self.nodes
        finally:
            self.nodes = around
        if len(self.noise.draws) > drawn:
            raise Unsupported("random numbers inside it: how many are drawn depends on its way")

    def reads_output(self, index: int) -> bool:
        """Whether anything reads the given result of the operator being translated."""
        return any(user.target is not operator.getitem or user.args[1] == index for user in self._origin.users)

    def operand(self, index: int) -> torch.Tensor:
        """An operand of the operator being translated as FX describes it, with the strides that ONNX does not have."""
        described: torch.Tensor = self._origin.args[index].meta["val"]
        return described

    # Constants

    def constant(self, array: np.ndarray, dtype: ir.DataType | None = None) -> ir.Value:
        """An initializer that holds the array; equal constants are the same value."""
        is_complex = np.iscomplexobj(array)
        if is_complex:  # numpy's memory is that of the pairs
            array = array.reshape(*array.shape, 1).view(array.real.dtype)
        tensor = ir.tensor(array, dtype=dtype)
        key = (f"{tensor.dtype}{' pairs' * is_complex}", tuple(array.shape), array.tobytes())
        if key not in self._constants:
            name = self.fresh("const")
            value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            tensor.name = name
            inference.set_dims(value, tuple(array.shape))
            self.initializers[name] = self._constants[key] = pairs.mark(value) if is_complex else value
        return self._constants[key]

    def constant_on_demand(self, make: Callable[[], np.ndarray], dims: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
        """An initializer that is computed whenever its value is asked for, and not kept."""
        name = self.fresh("const")
        tensor = ir.LazyTensor(lambda: ir.tensor(make(), name=name), dtype=dtype, shape=ir.Shape(dims), name=name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), const_value=tensor)
        inference.set_dims(value, dims)
        self.initializers[name] = value
        return value

    def constant_vector(self, value: Scalar, count: int, dtype: torch.dtype) -> ir.Value:
        """`count` times the same number."""
        return self.constant(dtypes.to_array(torch.full((count,), value, dtype=dtype)), dtypes.to_onnx(dtype))

    def ints(self, values: Sequence[int]) -> ir.Value:
        """A constant one-dimensional int64 tensor."""
        return self.constant(np.array(values, dtype=np.int64))

    def scalar(self, value: Operand, dtype: torch.dtype) -> ir.Value:
        """A number as a tensor without dimensions; a symbolic size is computed in the graph."""
        if isinstance(value, ir.Value):
            return self.cast(value, dtype)
        if isinstance(value, sympy.Expr):
            size = self.Squeeze(self.sizes.value(value), self.ints([0]))
            size.meta["dims"] = ()
            return self.cast(size, dtype)
        try:
            number = torch.tensor(value, dtype=dtype)
        except RuntimeError as error:  # torch wraps some such numbers around, and refuses others
            raise Unsupported(f"{value} is no number of dtype {dtype}") from error
        return self.constant(dtypes.to_array(number), dtypes.to_onnx(dtype))

    # Types and shapes

    def dims(self, x: ir.Value) -> Dims:
        """The sizes of a value: integers and symbolic expressions."""
        dims: Dims | None = x.meta.get("dims")
        if dims is None:
            raise Unsupported(f"the shape of {x.name} is not known")
        return dims

    def rank(self, x: ir.Value) -> int:
        """The number of dimensions of a value."""
        return len(self.dims(x))

    def dtype(self, x: ir.Value) -> torch.dtype:
        """The torch dtype of a value."""
        assert x.dtype is not None, x
        dtype = dtypes.to_torch(x.dtype)
        return dtype.to_complex() if pairs.are_pairs(x) else dtype

    def axis(self, x: ir.Value, dim: int) -> int:
        """A dimension counted from the front."""
        rank = max(self.rank(x), 1)
        return dim % rank

    def result_type(self, x: Operand, y: Operand) -> torch.dtype:
        """What torch computes in, given these operands: its promotion rules, asked of torch itself."""
        return torch.result_type(self._stand_in(x), self._stand_in(y))

    def _stand_in(self, operand: Operand) -> Any:
        if isinstance(operand, ir.Value):
            rank = self.rank(operand) - pairs.are_pairs(operand)
            return torch.empty((1,) * min(rank, 1), dtype=self.dtype(operand), device="meta")
        return 1 if isinstance(operand, sympy.Expr) else operand

    def cast(self, x: Operand, dtype: torch.dtype) -> ir.Value:
        """The operand as a tensor of `dtype`; no node where it is one already."""
        if not isinstance(x, ir.Value):
            return self.scalar(x, dtype)
        if dtype.is_complex or pairs.are_pairs(x):
            return pairs.cast(self, x, dtype)
        to = dtypes.to_onnx(dtype)
        if x.dtype == to:
            return x
        if x.name in self.initializers and x.const_value is not None and not self.rank(x):
            number = torch.tensor(x.const_value.numpy().item(), dtype=self.dtype(x))
            return self.scalar(number.to(dtype).item(), dtype)
        if (x.dtype, to) == (ir.DataType.DOUBLE, ir.DataType.UINT8):  # the low bits of an int64, as torch takes them
            x = self.Cast(x, dtype=ir.DataType.INT64)
        return self.Cast(x, dtype=to)

    def promote(self, x: Operand, y: Operand) -> list[ir.Value]:
        """The operands as tensors of the dtype torch would compute in."""
        dtype = self.result_type(x, y)
        return [self.cast(x, dtype), self.cast(y, dtype)]

    def shape_value(self, dims: Sequence[Dim]) -> ir.Value:
        """Sizes as a one-dimensional int64 tensor: a constant where all are known."""
        return self.sizes.vector(dims)

    # Compositions that every family needs

    def shaped(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """State the sizes of a value that was just made."""
        inference.set_dims(x, tuple(dims))
        return x

    def reshape(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """`x` seen with other sizes; no node where they are the same."""
        dims = tuple(dims)
        if x.meta.get("dims") == dims:
            return x
        target, allowzero = self.sizes.target(x, dims)
        return self.shaped(self.Reshape(x, target, allowzero=1 if allowzero else None), dims)

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Axes in another order; no node for the order they have."""
        if list(perm) == list(range(len(perm))):
            return x
        dims = self.dims(x)
        return self.shaped(self.Transpose(x, perm=list(perm)), [dims[axis] for axis in perm])

    def expand(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Broadcast to exactly these sizes; no node where `x` has them."""
        dims = tuple(dims)
        if self.dims(x) == dims:
            return x
        return self.shaped(self.Expand(x, self.shape_value(dims)), dims)

    def unsqueeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Insert axes of size one at these places of the result."""
        dims = list(self.dims(x))
        axes = sorted(axis % (len(dims) + len(axes)) for axis in axes)
        for axis in axes:
            dims.insert(axis, 1)
        return self.shaped(self.Unsqueeze(x, self.ints(axes)), dims) if axes else x

    def squeeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Drop axes of size one."""
        axes = sorted(self.axis(x, axis) for axis in axes)
        dims = [dim for i, dim in enumerate(self.dims(x)) if i not in axes]
        return self.shaped(self.Squeeze(x, self.ints(axes)), dims) if axes else x

    def slice(self, x: ir.Value, axis: int, start: Dim, end: Dim, step: int = 1) -> ir.Value:
        """`x[start:end:step]` along one axis; sizes may be symbolic, negative ones are not allowed here."""
        return self.Slice(x, *(self.shape_value([v]) for v in (start, end)), self.ints([axis]), self.ints([step]))

    def Pad(  # a node like others, but for its axes
        self,
        x: ir.Value,
        amounts: ir.Value,
        fill: ir.Value | None = None,
        axes: ir.Value | None = None,
        mode: str | None = None,
    ) -> ir.Value:
        """Pad along some axes, written for all: ONNX Runtime forgets `axes` where it moves a Transpose past it."""
        if axes is not None:
            assert axes.const_value is not None
            rank = self.rank(x)
            places = [axis % rank + side for side in (0, rank) for axis in axes.const_value.numpy().tolist()]
            amounts = self.ScatterElements(self.ints([0] * (2 * rank)), self.ints(places), amounts, axis=0)
        return self.node("Pad", [x, amounts, fill], mode=mode)

    def uniform(self, dims: Sequence[Dim], dtype: torch.dtype = torch.float32) -> ir.Value:
        """Fresh random numbers, evenly spread over [0, 1)."""
        return self.noise("uniform", tuple(dims), dtype)

    def normal(self, dims: Sequence[Dim], dtype: torch.dtype = torch.float32) -> ir.Value:
        """Fresh random numbers from the standard normal distribution."""
        return self.noise("normal", tuple(dims), dtype)

    def like(self, value: torch.Tensor) -> Dims:
        """The sizes of the value that stands for a tensor that FX describes."""
        return pairs.dims_of(value)

    def dim(self, size: Any) -> Dim:
        """A size that FX describes: an integer or an expression."""
        return dim_of(size)
