"""What a call gives while torch traces: tensors without values, of the right dtypes and sizes, symbolic or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from sardonyx.onnx_ops.inference import Result, inferred
from sardonyx.onnx_ops.limits import check_call
from sardonyx.onnx_ops.nodes import Dim, bound, described, inputs_of, may_be_sizes, outputs_of
from sardonyx.onnx_ops.rules import RULES
from sardonyx.onnx_ops.schemas import Operator

Results: TypeAlias = "list[Result]"


def fake(operator: Operator, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The results of a call with fake tensors."""
    given = bound(operator, args, kwargs)
    first = next((x for x in inputs_of(operator, given) if x is not None), None)
    results, sizes = _results(operator, given)
    made = []
    for result, dims in zip(results, sizes, strict=True):
        if dims is None:
            raise DynamicOutputShapeException(overload)
        known = [torch.library.get_ctx().new_dynamic_size() if dim is None else dim for dim in dims]
        made.append(torch.empty(known, dtype=result.dtype, device=first.device))  # type: ignore[union-attr]
    return made


def _results(operator: Operator, given: Mapping[str, Any]) -> tuple[Results, list[Any]]:
    """What is known of the results, and their sizes as torch has them.

    Sizes that a rule tells, or that ONNX Runtime hands on by name, stay symbols. Where it would know more if it knew
    the numbers, symbols of equal numbers are taken for equal; where that does not help, all for the numbers they are.
    Both are conditions that torch then checks. What is open even so depends on values.
    """
    wanted, symbols = outputs_of(operator, given), _Symbols()
    call = described(operator, given, symbols.named)
    check_call(call)
    results = list(inferred(call))
    ruled = RULES.get((operator.domain, operator.op_type), _no_rule)(given)  # of operands that inference takes
    if symbols and any(i not in ruled for i in wanted):
        results = _checked(operator, given, symbols, results)
    sizes = [ruled.get(i, symbols.sizes(result)) for i, result in zip(wanted, results, strict=True)]
    return results, sizes


def _no_rule(given: Mapping[str, Any]) -> dict[int, Sequence[Any]]:
    return {}


def _checked(operator: Operator, given: Mapping[str, Any], symbols: _Symbols, results: Results) -> Results:
    """What is inferred of symbols, as far as it is what is inferred of their numbers; with conditions, if need be.

    Inference is not to be trusted with symbols: for some operators it calculates with zero in their place.
    """
    if not symbols.have_hints():
        return [Result(r.dtype, r.dims and tuple(dim or None for dim in r.dims)) for r in results]
    best = list(inferred(described(operator, given, symbols.hinted)))
    results = symbols.agreeing(results, best)
    if _unknown(results) == _unknown(best):
        return results
    merged = symbols.agreeing(list(inferred(described(operator, given, symbols.merged))), best)
    if _unknown(merged) == _unknown(best):
        return merged
    return list(inferred(described(operator, given, lambda x: tuple(int(dim) for dim in x.shape))))


def _unknown(results: Results) -> tuple[int, int]:
    """How many results have no number of dimensions, and how many sizes are open."""
    return sum(r.dims is None for r in results), sum((r.dims or ()).count(None) for r in results)


class _Symbols:
    """Symbolic sizes, and the names that they have in a model."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._sizes: dict[str, torch.SymInt] = {}

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def named(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """The sizes of a tensor, symbols by their names."""
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

    def sizes(self, result: Result) -> list[Any] | None:
        """The sizes of a result as torch has them."""
        if result.dims is None:
            return None
        return [self._sizes[dim] if isinstance(dim, str) else dim for dim in result.dims]

    def agreeing(self, results: Results, numbers: Results) -> Results:
        """Results without those sizes that are not the numbers they should be."""
        return [Result(n.dtype, self._agreeing(r.dims, n.dims)) for r, n in zip(results, numbers, strict=True)]

    def _agreeing(self, dims: tuple[Dim, ...] | None, numbers: tuple[Dim, ...] | None) -> tuple[Dim, ...] | None:
        if dims is None or numbers is None or len(dims) != len(numbers):
            return None
        return tuple(dim if self._hint(dim) == number else None for dim, number in zip(dims, numbers, strict=True))

    def _hint(self, dim: Dim) -> Dim:
        return int(self._sizes[dim].node.hint) if isinstance(dim, str) else dim

    def have_hints(self) -> bool:
        """Whether all have numbers in the call that is traced."""
        return all(size.node.has_hint() for size in self._sizes.values())

    def hinted(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """The sizes of a tensor in the call that is traced, without a condition."""
        return tuple(dim.node.hint if isinstance(dim, torch.SymInt) else dim for dim in tensor.shape)

    def merged(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """The sizes of a tensor, one name for symbols that are equal in the call that is traced."""
        return tuple(self._first_like(dim) if isinstance(dim, str) else dim for dim in self.named(tensor))

    def _first_like(self, name: str) -> str:
        size = self._sizes[name]
        same = (x for x, other in self._sizes.items() if other.node.hint == size.node.hint)
        return next(x for x in same if x == name or bool(self._sizes[x] == size))
