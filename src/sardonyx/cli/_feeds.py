"""Inputs of a model by name: read from a file, or random with the model's dtypes and shapes."""

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
"""Upper bound of random integers, unless they index a table."""
_KEEP_VALUES = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand"}
"""Operators whose result has the values of their first input."""
_LOOKUPS = {"Gather": (0, 1), "EmbedLayerNormalization": (2, 0)}
"""Lookup operators: the index of the table among the inputs, and that of the row numbers."""
_INPUTS_HINT = "give all inputs by name with --inputs FILE.npz"


def inputs_of(model: ir.Model) -> list[ir.Value]:
    """Return the inputs without a default value."""
    return [value for value in model.graph.inputs if not value.is_initializer()]


def read_inputs(path: Path, model: ir.Model) -> dict[str, Array]:
    """Read the inputs of a model from a file, and check their names, dtypes and shapes."""
    arrays = _read_arrays(path)
    inputs = {str(value.name): value for value in inputs_of(model)}
    for name in arrays:
        if name not in inputs:
            raise SardonyxError(f"{path} has {name!r}, which is not an input of the model", hint=suggest(name, inputs))
    missing = [name for name in inputs if name not in arrays]
    if missing:
        raise SardonyxError(f"{path} lacks the input {missing[0]!r}", hint=f"the model takes {', '.join(inputs)}")
    sizes: dict[str, int] = {}
    for name, value in inputs.items():
        _check_input(path, value, arrays[name], sizes)
    return {name: arrays[name] for name in inputs}


def _read_arrays(path: Path) -> dict[str, Array]:
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix != ".npz":
        raise SardonyxError(
            f"{path} is not a file of inputs", hint="use .npz, as numpy.savez writes it, or .safetensors"
        )
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:
        raise SardonyxError(
            f"{path} cannot be read: {error}", hint="write it with numpy.savez(path, name=array)"
        ) from error


def _safetensors(path: Path) -> dict[str, Array]:
    load_file = _safetensors_in_torch().load_file
    try:
        return {name: dtypes.to_array(tensor) for name, tensor in load_file(path).items()}
    except Exception as error:
        raise SardonyxError(
            f"{path} cannot be read: {error}", hint="write it with safetensors.torch.save_file({name: tensor}, path)"
        ) from error


def _safetensors_in_torch() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise MissingDependency(
            "a .safetensors file needs the package safetensors", hint="pip install safetensors"
        ) from error


def write_arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors by name to a file that `read_inputs` can read, atomically."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder, path.name)
        _write_file(temporary, tensors)
        temporary.replace(path)


def _write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    if path.suffix == ".safetensors":
        _safetensors_in_torch().save_file({name: x.contiguous() for name, x in tensors.items()}, path)
        return
    bfloat16 = [name for name, x in tensors.items() if x.dtype == torch.bfloat16]
    if path.suffix != ".npz" or bfloat16:
        why = f"cannot hold {bfloat16[0]!r}: numpy has no bfloat16" if bfloat16 else "is not a file of arrays"
        raise SardonyxError(f"{path.name} {why}", hint="use .safetensors" if bfloat16 else "use .npz or .safetensors")
    arrays: dict[str, Any] = {name: dtypes.to_array(x) for name, x in tensors.items()}
    np.savez(path, **arrays)


def _check_input(path: Path, value: ir.Value, array: Array, sizes: dict[str, int]) -> None:
    """Check an array against the dtype and shape of an input; `sizes` collects the values of named sizes."""
    dtype = _numpy_dtype(value)
    if array.dtype != dtype:
        raise SardonyxError(
            f"{value.name} is {array.dtype} in {path}, but the model takes {dtype}",
            hint=f"save it as array.astype({str(dtype)!r})",
        )
    if value.shape is None:
        return
    mismatch = f"{value.name} is {list(array.shape)} in {path}, but the model takes {format_dims(dims_of(value))}"
    if len(value.shape) != array.ndim:
        raise SardonyxError(mismatch, hint="change the number of dimensions with numpy.reshape")
    for dim, size in zip(value.shape, array.shape, strict=True):
        if isinstance(dim, int) and dim != size:
            raise SardonyxError(mismatch, hint="`sardonyx export --dynamic` makes a fixed size dynamic")
        if _is_name(dim) and sizes.setdefault(str(dim.value), size) != size:
            raise SardonyxError(mismatch, hint="sizes with the same name must be equal")


def _is_name(dim: int | ir.SymbolicDim) -> TypeGuard[ir.SymbolicDim]:
    return isinstance(dim, ir.SymbolicDim) and dim.value is not None and str(dim.value).isidentifier()


def dims_of(value: ir.Value) -> list[int | str | None] | None:
    """Return the sizes of a value: numbers, names, or None for unknown ones; None if the rank is unknown."""
    return None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]


def format_dims(dims: Sequence[int | str | None] | None) -> str:
    """Format sizes.

    >>> format_dims(["batch", 3, None]), format_dims([]), format_dims(None)
    ('[batch, 3, ?]', '[]', '[…]')
    """
    return "[…]" if dims is None else f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def random_inputs(model: ir.Model, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    """Return random inputs: named sizes default to 1, token ids are below the vocabulary size, booleans are true."""
    known = {name for value in inputs_of(model) for name in _dim_names(value)}
    for name in sizes:
        if name not in known:
            raise OptionError(f"the model has no size named {name!r}", hint=suggest(name, known))
    generator = np.random.default_rng(seed)
    try:
        return {str(value.name): _random_array(generator, value, sizes) for value in inputs_of(model)}
    except (MemoryError, ValueError) as error:
        hint = "set other sizes with --size, or use --inputs"
        raise OptionError(f"inputs of these sizes cannot be created: {error}", hint=hint) from error


def _dim_names(value: ir.Value) -> set[str]:
    """Return the names in the sizes of a value."""
    texts = [str(dim.value) for dim in value.shape or () if not isinstance(dim, int) and dim.value is not None]
    return {name for text in texts for name in (text, *DimExpression(text).names)}


def _random_array(generator: np.random.Generator, value: ir.Value, sizes: Mapping[str, int]) -> Array:
    dtype, dims = _numpy_dtype(value), _dims(value, sizes)
    if dtype == np.bool_:
        return np.ones(dims, dtype)
    if dtype.kind in "iu" or "int" in dtype.name:
        rows = _table_rows(value)
        if rows is None and "mask" in str(value.name):  # if everything is masked, softmax gives NaN
            return np.ones(dims, dtype)
        return generator.integers(0, rows or _DEFAULT_INTEGER_BOUND, dims).astype(dtype)
    return generator.standard_normal(dims).astype(dtype)


def _numpy_dtype(value: ir.Value) -> np.dtype[Any]:
    if value.dtype is None or value.dtype in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        raise SardonyxError(f"the input {value.name!r} is not a tensor of numbers", hint=_INPUTS_HINT)
    return np.dtype(value.dtype.numpy())


def _dims(value: ir.Value, sizes: Mapping[str, int]) -> list[int]:
    if value.shape is None:
        raise SardonyxError(f"the rank of the input {value.name!r} is unknown", hint=_INPUTS_HINT)
    return [dim if isinstance(dim, int) else _evaluate_dim(dim, sizes) for dim in value.shape]


def _evaluate_dim(dim: ir.SymbolicDim, sizes: Mapping[str, int]) -> int:
    text = str(dim.value)
    if dim.value is None:
        return 1
    if text in sizes:
        return sizes[text]
    return DimExpression(text).value(sizes)


def _table_rows(value: ir.Value) -> int | None:
    """Return the number of rows of the smallest table that these integers index, as far as the graph shows."""
    sizes: list[int] = []
    pending, seen = [value], set()
    while pending:
        for use in pending.pop().uses():
            node, index = use.node, use.idx
            if node in seen:
                continue
            if index == 0 and node.op_type in _KEEP_VALUES:
                seen.add(node)
                pending.append(node.outputs[0])
            table, by = _LOOKUPS.get(node.op_type, (0, None))
            rows = node.inputs[table] if by == index else None
            if rows is not None and rows.is_initializer() and rows.shape is not None:
                sizes.append(int(rows.shape[node.attributes.get_int("axis", 0)]))  # type: ignore[arg-type]  # a weight
    return min(sizes, default=None)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name."""
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {similar[0]!r}?" if similar else f"the model has {', '.join(sorted(known)) or 'none'}"
