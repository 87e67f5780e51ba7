"""Fake kernels: results without data, with the right dtypes and symbolic or concrete shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from sardonyx.onnx_ops.inference import ResultInfo, infer_results
from sardonyx.onnx_ops.limits import check_call
from sardonyx.onnx_ops.nodes import Dim, bind_arguments, inputs_of, may_be_sizes, node_spec, requested_outputs
from sardonyx.onnx_ops.rules import RULES
from sardonyx.onnx_ops.schemas import Operator

Results: TypeAlias = "list[ResultInfo]"


def fake_results(
    operator: Operator, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the results of a call with fake tensors."""
    arguments = bind_arguments(operator, args, kwargs)
    first = next((x for x in inputs_of(operator, arguments) if x is not None), None)
    results, sizes = _infer(operator, arguments)
    tensors = []
    for result, dims in zip(results, sizes, strict=True):
        if dims is None:
            raise DynamicOutputShapeException(overload)
        shape = [torch.library.get_ctx().new_dynamic_size() if dim is None else dim for dim in dims]
        tensors.append(torch.empty(shape, dtype=result.dtype, device=first.device))  # type: ignore[union-attr]
    return tensors


def _infer(operator: Operator, arguments: Mapping[str, Any]) -> tuple[Results, list[Any]]:
    """Return dtypes and dims of the results, and their sizes as torch values.

    Sizes from a rule, or that ONNX Runtime propagates by name, stay symbolic. Where inference needs concrete sizes,
    symbols with equal hints are merged; where that does not suffice, all symbols are specialized to their hints. torch
    guards on both. Dimensions still unknown then are data-dependent.
    """
    wanted, symbols = requested_outputs(operator, arguments), _Symbols()
    call = node_spec(operator, arguments, symbols.symbolic_dims)
    check_call(call)
    results = list(infer_results(call))
    rule = RULES.get((operator.domain, operator.op_type), _no_rule)
    shapes_by_rule = rule(arguments)  # after inference, which rejects invalid operands
    if symbols and any(i not in shapes_by_rule for i in wanted):
        results = _check_symbolic(operator, arguments, symbols, results)
    sizes = [shapes_by_rule.get(i, symbols.sizes(result)) for i, result in zip(wanted, results, strict=True)]
    return results, sizes


def _no_rule(arguments: Mapping[str, Any]) -> dict[int, Sequence[Any]]:
    return {}


def _check_symbolic(operator: Operator, arguments: Mapping[str, Any], symbols: _Symbols, results: Results) -> Results:
    """Drop symbolic dims that disagree with inference on concrete sizes, and add guards if needed.

    Inference is unreliable with symbols: for some operators it computes with zero in their place.
    """
    if not symbols.have_hints():
        return [ResultInfo(r.dtype, r.dims and tuple(dim or None for dim in r.dims)) for r in results]
    concrete = list(infer_results(node_spec(operator, arguments, symbols.hint_dims)))
    results = symbols.keep_agreeing(results, concrete)
    if _count_unknown(results) == _count_unknown(concrete):
        return results
    merged = symbols.keep_agreeing(list(infer_results(node_spec(operator, arguments, symbols.merged_dims))), concrete)
    if _count_unknown(merged) == _count_unknown(concrete):
        return merged
    return list(infer_results(node_spec(operator, arguments, lambda x: tuple(int(dim) for dim in x.shape))))


def _count_unknown(results: Results) -> tuple[int, int]:
    return sum(r.dims is None for r in results), sum((r.dims or ()).count(None) for r in results)


class _Symbols:
    """Maps symbolic sizes to names of dims in a model, and back."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._sizes: dict[str, torch.SymInt] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def symbolic_dims(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """Return the dims of a tensor, with names for symbols."""
        return tuple(map(int if may_be_sizes(tensor) else self._name, tensor.shape))

    def _name(self, dim: Any) -> Dim:
        if not isinstance(dim, torch.SymInt):
            return int(dim)
        expression = dim.node.expr
        if expression.is_number:
            return int(expression)
        name = self._names.setdefault(expression, f"d{len(self._names)}")
        self._sizes.setdefault(name, dim)
        return name

    def sizes(self, result: ResultInfo) -> list[Any] | None:
        if result.dims is None:
            return None
        return [self._sizes[dim] if isinstance(dim, str) else dim for dim in result.dims]

    def keep_agreeing(self, results: Results, numbers: Results) -> Results:
        """Return results with dims that disagree with the concrete ones replaced by None."""
        return [ResultInfo(n.dtype, self._agreeing_dims(r.dims, n.dims)) for r, n in zip(results, numbers, strict=True)]

    def _agreeing_dims(self, dims: tuple[Dim, ...] | None, numbers: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
        if dims is None or numbers is None or len(dims) != len(numbers):
            return None
        return tuple(dim if self._hint(dim) == number else None for dim, number in zip(dims, numbers, strict=True))

    def _hint(self, dim: Dim) -> Dim:
        return int(self._sizes[dim].node.hint) if isinstance(dim, str) else dim

    def have_hints(self) -> bool:
        return all(size.node.has_hint() for size in self._sizes.values())

    def hint_dims(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """Return the hints of a tensor's sizes, without adding guards."""
        return tuple(dim.node.hint if isinstance(dim, torch.SymInt) else dim for dim in tensor.shape)

    def merged_dims(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """Return the dims of a tensor, with one name for symbols of equal hints; adds guards."""
        return tuple(self._first_equal(dim) if isinstance(dim, str) else dim for dim in self.symbolic_dims(tensor))

    def _first_equal(self, name: str) -> str:
        size = self._sizes[name]
        same = (x for x, other in self._sizes.items() if other.node.hint == size.node.hint)
        return next(x for x in same if x == name or bool(self._sizes[x] == size))
