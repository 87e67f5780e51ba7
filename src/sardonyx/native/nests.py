"""Loop nests: which results of a region share a nest, and in how many passes over each row.

A nest has outer axes, whose indices are rows that run in parallel, and inner axes, along which a row is swept. A
reduction over the inner axes gives a value per row, which the next sweep over the same row may use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

from sardonyx.native.values import (
    Buffer,
    CannotView,
    Expressions,
    Value,
    View,
    common_factors,
    contiguous,
    dim_of,
    gathered_buffers,
    views_of,
)
from sardonyx.sizes import Dim, Dims

Reduction: TypeAlias = Literal["Sum", "Product", "Largest", "Smallest", "Dot"]
""""Dot" is the sum of products of two views: a matrix product."""


@dataclass(frozen=True)
class Root:
    """A write to memory: an expression at each index, or its reduction over some axes."""

    value: Value
    target: View
    """The written view: over the indices of the expression, or those that remain after the reduction."""
    reduction: Reduction | None = None
    reduced: frozenset[int] = frozenset()

    @property
    def buffer(self) -> Buffer:
        """The written buffer."""
        return self.target.buffer

    @property
    def fills(self) -> bool:
        """Whether it writes its whole buffer contiguously."""
        whole = count(self.buffer.dims) == count(self.target.dims) and self.target.offset == 0
        return whole and self.target.strides == contiguous(self.target.dims)


@dataclass(frozen=True)
class Step:
    """A root in a nest."""

    root: Root
    level: int
    """The pass over a row that computes it."""
    once: bool
    """Whether its indices are the rows, so that it is computed once per row, before that pass."""

    @property
    def per_row(self) -> bool:
        """Whether it gives one value per row."""
        return self.once or self.root.reduction is not None


@dataclass
class Nest:
    """Steps that share loops."""

    dims: Dims
    inner: frozenset[int] | None
    """The axes along which rows are swept; None without reductions, when any will do."""
    steps: list[Step] = field(default_factory=list)

    @property
    def outer(self) -> list[int]:
        """The axes whose indices are rows."""
        return [axis for axis in range(len(self.dims)) if axis not in (self.inner or ())]

    @property
    def passes(self) -> int:
        """The number of sweeps over a row."""
        return 1 + max(step.level for step in self.steps)

    @property
    def across(self) -> bool:
        """Whether lanes are rows, because the last axis is not swept."""
        return self.inner is not None and len(self.dims) - 1 not in self.inner

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, which shares its loops with nothing."""
        return self.steps[0].root.reduction == "Dot"

    @property
    def is_strided(self) -> bool:
        """Whether some access along the last axis, that of the lanes, has a stride."""
        return not self.is_product and any(
            _is_strided(view, axes, len(self.dims) - 1) for view, axes in _all_accesses(self)
        )

    @property
    def transposed_axis(self) -> int | None:
        """The axis along which strided accesses are contiguous, if nothing is reduced."""
        if self.inner is not None or self.is_product:
            return None
        last = len(self.dims) - 1
        strided = (view for view, axes in _all_accesses(self) if _is_strided(view, axes, last) and 1 in view.strides)
        return next((view.strides.index(1) for view in strided), None)

    def crosses(self, buffer: Buffer) -> bool:
        """Return whether a later pass reads what an earlier one wrote."""
        step = self.step_writing(buffer)
        readers = (s for s in self.steps if any(view.buffer is buffer for view in views_of(s.root.value)))
        return step is not None and any(reader.level > step.level for reader in readers)

    def step_writing(self, buffer: Buffer) -> Step | None:
        """Return the step that writes a buffer."""
        return next((step for step in self.steps if step.root.buffer is buffer), None)


def live_roots(roots: Sequence[Root]) -> list[Root]:
    """Return the roots that outputs depend on."""
    needed: set[Buffer] = set()
    live = []
    for root in reversed(roots):
        if root.buffer.kind == "output" or root.buffer in needed:
            live.append(root)
            needed |= {view.buffer for view in views_of(root.value)}
    return live[::-1]


def nests_of(roots: Sequence[Root], expressions: Expressions) -> list[Nest]:
    """Group roots, in dependency order, into as few nests as possible."""
    nests: list[Nest] = []
    for root in roots:
        candidates = (nest for nest in _candidates(nests, root) if not nest.is_product and root.reduction != "Dot")
        if not any(_join(nest, root) or _join_in_pieces(nest, root, expressions) for nest in candidates):
            inner = root.reduced if root.reduction else None
            nests.append(Nest(root.value.dims, inner, [Step(root, 0, once=False)]))
    return nests


def _candidates(nests: Sequence[Nest], root: Root) -> Iterator[Nest]:
    """Yield nests from the last back to one that the root depends on."""
    read = {view.buffer for view in views_of(root.value)}
    for nest in reversed(nests):
        yield nest
        if any(step.root.buffer in read or step.root.buffer is root.buffer for step in nest.steps):
            return


def _join(nest: Nest, root: Root) -> bool:
    """Add a root to a nest with the same indices, if it needs nothing from another row."""
    rows = tuple(nest.dims[axis] for axis in nest.outer)
    if root.value.dims == nest.dims and (not root.reduction or nest.inner in (None, root.reduced)):
        inner, once = (root.reduced if root.reduction else nest.inner), False
    elif nest.inner and not root.reduction and root.value.dims == rows:
        inner, once = nest.inner, True
    else:
        return False
    level = _level(replace(nest, inner=inner), root, once)
    if level is None:
        return False
    nest.inner = inner
    nest.steps.append(Step(root, level, once))
    return True


def _join_in_pieces(nest: Nest, root: Root, expressions: Expressions) -> bool:
    """Add a root that reads rows of a nest in another shape, by splitting axes of both until they agree."""
    if root.reduction or nest.inner is None or not any(nest.step_writing(view.buffer) for view in views_of(root.value)):
        return False
    factors = common_factors(nest.dims, root.value.dims)
    if factors is None:
        return False
    try:
        finer = nest
        for axis in reversed(range(len(nest.dims))):
            finer = _split(finer, axis, factors[0][axis], expressions)
        value, target = root.value, root.target
        for axis in reversed(range(len(root.value.dims))):
            value = expressions.split(value, axis, factors[1][axis])
            target = cast(View, expressions.split(target, axis, factors[1][axis]))
    except CannotView:
        return False
    if not _join(finer, replace(root, value=value, target=target)):
        return False
    nest.dims, nest.inner, nest.steps = finer.dims, finer.inner, finer.steps
    return True


def _level(nest: Nest, root: Root, once: bool) -> int | None:
    """Return the pass in which a root can be computed; None if it depends on other rows."""
    other = nest.step_writing(root.buffer)
    if other is not None and (root.reduction or other.per_row or root.fills or other.root.fills):
        return None  # only pieces of a concatenation share a buffer
    if any(nest.step_writing(buffer) for buffer in gathered_buffers(root.value)):
        return None
    level = 0
    for view in views_of(root.value):
        step = nest.step_writing(view.buffer)
        if step is None:
            continue
        if not step.root.fills or (once and not step.per_row) or view.offset != 0 or view.guards:
            return None
        if view.strides != _same_place_strides(nest, step, once):
            return None
        level = max(level, step.level + (step.root.reduction is not None))
    return level


def _same_place_strides(nest: Nest, step: Step, once: bool) -> Dims:
    """Return the strides that read a step's result at the same index, or in the same row."""
    if not step.per_row:
        return contiguous(nest.dims)
    rows = contiguous([nest.dims[axis] for axis in nest.outer])
    if once:
        return rows
    by_axis = dict(zip(nest.outer, rows, strict=True))
    return tuple(by_axis.get(axis, 0) for axis in range(len(nest.dims)))


def merge_axes(nest: Nest, expressions: Expressions) -> Nest:
    """Merge neighbouring axes wherever every access allows, for longer loops."""
    axis = 0
    while axis + 1 < len(nest.dims):
        if _mergeable(nest, axis):
            nest = _merge(nest, axis, expressions)
        else:
            axis += 1
    return nest


def _accesses(nest: Nest, step: Step) -> Iterator[tuple[View, list[int]]]:
    """Yield the views of a step with the axes of the nest that each covers."""
    axes = nest.outer if step.once else list(range(len(nest.dims)))
    for view in views_of(step.root.value):
        yield view, axes
    yield step.root.target, nest.outer if step.per_row else axes


def _all_accesses(nest: Nest) -> Iterator[tuple[View, list[int]]]:
    return (access for step in nest.steps for access in _accesses(nest, step) if access[0].buffer.kind != "indices")


def _is_strided(view: View, axes: Sequence[int], last: int) -> bool:
    return last in axes and view.strides[axes.index(last)] not in (0, 1)


def _mergeable(nest: Nest, axis: int) -> bool:
    if (axis in nest.outer) != (axis + 1 in nest.outer):
        return False
    for step in nest.steps:
        for view, axes in _accesses(nest, step):
            if axis in axes:
                position = axes.index(axis)
                if view.strides[position] != dim_of(view.strides[position + 1] * nest.dims[axis + 1]):
                    return False
                if any(guard.axis in (position, position + 1) for guard in view.guards):
                    return False
    return True


def _merge(nest: Nest, axis: int, expressions: Expressions) -> Nest:
    merged = dim_of(nest.dims[axis] * nest.dims[axis + 1])
    dims = (*nest.dims[:axis], merged, *nest.dims[axis + 2 :])
    return _change_axis(nest, axis, expressions.merge, lambda a: [a - (a > axis)], dims)


def _split(nest: Nest, axis: int, factors: Dims, expressions: Expressions) -> Nest:
    def new_axes(a: int) -> Sequence[int]:
        return range(axis, axis + len(factors)) if a == axis else [a + (len(factors) - 1) * (a > axis)]

    dims = (*nest.dims[:axis], *factors, *nest.dims[axis + 1 :])
    return _change_axis(nest, axis, lambda value, at: expressions.split(value, at, factors), new_axes, dims)


def _change_axis(
    nest: Nest, axis: int, change: Callable[[Value, int], Value], new_axes: Callable[[int], Sequence[int]], dims: Dims
) -> Nest:
    """Change every access at an axis; `new_axes` maps an old axis to new ones."""

    def change_view(value: Value, axes: Sequence[int]) -> Value:
        return change(value, axes.index(axis)) if axis in axes else value

    def map_axes(axes: frozenset[int]) -> frozenset[int]:
        return frozenset(new for old in axes for new in new_axes(old))

    def change_step(step: Step) -> Step:
        axes = nest.outer if step.once else list(range(len(nest.dims)))
        value = change_view(step.root.value, axes)
        target = change_view(step.root.target, nest.outer if step.per_row else axes)
        assert isinstance(target, View)
        return replace(step, root=replace(step.root, value=value, target=target, reduced=map_axes(step.root.reduced)))

    inner = None if nest.inner is None else map_axes(nest.inner)
    return Nest(dims, inner, [change_step(step) for step in nest.steps])


def count(dims: Sequence[Dim]) -> Dim:
    """Return the product of sizes."""
    product: Dim = 1
    for dim in dims:
        product = dim_of(product * dim)
    return product
