"""Inputs of a model, by name: read from a file, or made up from what the model says of them."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.cli._dims import DimExpression
from sardonyx.errors import MissingDependency, OptionError, SardonyxError

Array: TypeAlias = np.ndarray[Any, Any]

_DEFAULT_INTEGER_BOUND = 2
"""Integers of which nothing is known are below this."""
_VALUE_PRESERVING = frozenset(
    {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand"}
)
"""Operators whose result has the numbers of their first input."""
_LOOKUPS = {"Gather": (0, 1), "EmbedLayerNormalization": (2, 0)}
"""Operators that look rows up: which input has the rows, and which says what rows."""
_INPUTS_HINT = "--inputs FILE.npz gives the inputs, each by its name"


def inputs_of(model: ir.Model) -> list[ir.Value]:
    """The inputs that a caller gives."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def read_inputs(path: Path, model: ir.Model) -> dict[str, Array]:
    """The arrays of a file, which are all the model's inputs, of its types and sizes."""
    arrays = _read_arrays(path)
    wanted = {str(value.name): value for value in inputs_of(model)}
    for name in arrays:
        if name not in wanted:
            raise SardonyxError(f"{path} has {name!r}, which is no input of the model", hint=suggest(name, wanted))
    lacking = [name for name in wanted if name not in arrays]
    if lacking:
        raise SardonyxError(f"{path} lacks the input {lacking[0]!r}", hint=f"the model takes {', '.join(wanted)}")
    named: dict[str, int] = {}
    for name, value in wanted.items():
        _check_input(path, value, arrays[name], named)
    return {name: arrays[name] for name in wanted}


def _read_arrays(path: Path) -> dict[str, Array]:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix != ".npz":
        raise SardonyxError(f"{path} is no file of inputs", hint="use .npz, as numpy.savez writes it, or .safetensors")
    try:
        with np.load(path) as held:
            return {name: held[name] for name in held.files}
    except Exception as error:
        raise SardonyxError(
            f"{path} cannot be read: {error}", hint="numpy.savez(path, name=array) writes one"
        ) from error


def _safetensors(path: Path) -> dict[str, Array]:
    load_file = _safetensors_in_torch().load_file
    try:
        return {name: dtypes.to_array(tensor) for name, tensor in load_file(path).items()}
    except Exception as error:
        raise SardonyxError(
            f"{path} cannot be read: {error}", hint="safetensors.torch.save_file({name: tensor}, path) writes one"
        ) from error


def _safetensors_in_torch() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise MissingDependency("a .safetensors file needs a package", hint="pip install safetensors") from error


def write_arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name to a file that `read_inputs` takes: all of it, or none."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as beside:
        made = Path(beside, path.name)
        _write_file(made, tensors)
        made.replace(path)


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    if path.suffix == ".safetensors":
        _safetensors_in_torch().save_file({name: x.contiguous() for name, x in tensors.items()}, path)
        return
    foreign = [name for name, x in tensors.items() if x.dtype == torch.bfloat16]
    if path.suffix != ".npz" or foreign:
        why = f"cannot hold {foreign[0]!r}: numpy has no bfloat16" if foreign else "is no file of arrays"
        raise SardonyxError(f"{path.name} {why}", hint="use .safetensors" if foreign else "use .npz or .safetensors")
    arrays: dict[str, Any] = {name: dtypes.to_array(x) for name, x in tensors.items()}
    np.savez(path, **arrays)


def _check_input(path: Path, value: ir.Value, array: Array, named: dict[str, int]) -> None:
    """An array is of the input's type and sizes, and a size with a name is the same everywhere."""
    kind = _numpy_dtype(value)
    if array.dtype != kind:
        raise SardonyxError(
            f"{value.name} is {array.dtype} in {path}, and the model takes {kind}",
            hint=f"save it as array.astype({str(kind)!r})",
        )
    if value.shape is None:
        return
    says = f"{value.name} is {list(array.shape)} in {path}, and the model takes {format_dims(dims_of(value))}"
    if len(value.shape) != array.ndim:
        raise SardonyxError(says, hint="numpy.reshape gives it another number of dimensions")
    for dim, size in zip(value.shape, array.shape, strict=True):
        if isinstance(dim, int) and dim != size:
            raise SardonyxError(says, hint="a size that is a number is settled; `sardonyx export --dynamic` frees it")
        if _is_name(dim) and named.setdefault(str(dim.value), size) != size:
            raise SardonyxError(says, hint="sizes with the same name are equal")


def _is_name(dim: int | ir.SymbolicDim) -> TypeGuard[ir.SymbolicDim]:
    return isinstance(dim, ir.SymbolicDim) and dim.value is not None and str(dim.value).isidentifier()


def dims_of(value: ir.Value) -> list[int | str | None] | None:
    """The sizes of a value: numbers, names, and None for those that are not known; None if nothing is."""
    return None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def format_dims(dims: Sequence[int | str | None] | None) -> str:
    """Sizes for people.

    >>> sizes(["batch", 3, None]), sizes([]), sizes(None)
    ('[batch, 3, ?]', '[]', '[…]')
    """
    return "[…]" if dims is None else f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def random_inputs(model: ir.Model, given: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Random inputs: a size with a name is 1 unless it is told, token ids are below the vocabulary, booleans true."""
    known = {name for value in inputs_of(model) for name in _dim_names(value)}
    for name in given:
        if name not in known:
            raise OptionError(f"the model has no size named {name!r}", hint=suggest(name, known))
    draw = np.random.default_rng(seed)
    try:
        return {str(value.name): _random_array(draw, value, given) for value in inputs_of(model)}
    except (MemoryError, ValueError) as error:
        hint = "say other sizes with --size, or give --inputs"
        raise OptionError(f"no inputs of these sizes can be made: {error}", hint=hint) from error


def _dim_names(value: ir.Value) -> set[str]:
    """The names that the sizes of a value are written with."""
    written = [str(dim.value) for dim in value.shape or () if not isinstance(dim, int) and dim.value is not None]
    return {name for text in written for name in (text, *DimExpression(text).names)}


def _random_array(draw: np.random.Generator, value: ir.Value, given: Mapping[str, int]) -> Array:
    kind, dims = _numpy_dtype(value), _dims(value, given)
    if kind == np.bool_:
        return np.ones(dims, kind)
    if kind.kind in "iu" or "int" in kind.name:
        rows = _table_rows(value)
        if rows is None and "mask" in str(value.name):  # with everything masked a softmax has nothing to look at
            return np.ones(dims, kind)
        return draw.integers(0, rows or _DEFAULT_INTEGER_BOUND, dims).astype(kind)
    return draw.standard_normal(dims).astype(kind)


def _numpy_dtype(value: ir.Value) -> np.dtype[Any]:
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise SardonyxError(f"the input {value.name!r} is no tensor of numbers", hint=_INPUTS_HINT)
    return np.dtype(value.dtype.numpy())


def _dims(value: ir.Value, given: Mapping[str, int]) -> list[int]:
    if value.shape is None:
        raise SardonyxError(f"the model does not say how many dimensions {value.name!r} has", hint=_INPUTS_HINT)
    return [dim if isinstance(dim, int) else _evaluate_dim(dim, given) for dim in value.shape]


def _evaluate_dim(dim: ir.SymbolicDim, given: Mapping[str, int]) -> int:
    text = str(dim.value)
    if dim.value is None:
        return 1
    if text in given:
        return given[text]
    return DimExpression(text).value(given)


def _table_rows(value: ir.Value) -> int | None:
    """How many rows the smallest table has that is looked up by these integers, as far as the graph shows it."""
    found: list[int] = []
    waiting, seen = [value], set()
    while waiting:
        carried = waiting.pop()
        for use in carried.uses():
            node, index = use.node, use.idx
            if node in seen:
                continue
            if index == 0 and node.op_type in _VALUE_PRESERVING:
                seen.add(node)
                waiting.append(node.outputs[0])
            table, by = _LOOKUPS.get(node.op_type, (0, None))
            rows = node.inputs[table] if by == index else None
            if rows is not None and rows.is_initializer() and rows.shape is not None:
                found.append(int(rows.shape[node.attributes.get_int("axis", 0)]))  # type: ignore[arg-type]  # a weight
    return min(found, default=None)


def suggest(name: str, known: Iterable[str]) -> str:
    """The next step after a name that is not known."""
    alike = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {alike[0]!r}?" if alike else f"the model has {', '.join(sorted(known)) or 'none'}"
