"""Loops: which results of a region are computed in one nest, and in how many passes over each row.

A nest has outer axes, whose places are rows that run in parallel, and inner axes, along which a row is swept. A
reduction over the inner axes leaves a number for the row, which the next sweep over the same row may use.
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
    common_pieces,
    contiguous,
    dim_of,
    gathered,
    views_of,
)
from sardonyx.sizes import Dim, Dims

How: TypeAlias = Literal["Sum", "Product", "Largest", "Smallest", "Dot"]
"""How places are reduced to one; "Dot" is the sum of what two views have multiplied, as a product of matrices."""


@dataclass(frozen=True)
class Root:
    """Something that is written to memory: an expression at each place, or its reduction over some axes."""

    value: Value
    target: View
    """Where it is written: a view over the places of the expression, or over those that a reduction keeps."""
    how: How | None = None
    reduced: frozenset[int] = frozenset()

    @property
    def buffer(self) -> Buffer:
        """What is written to."""
        return self.target.buffer

    @property
    def fills(self) -> bool:
        """Whether it writes all of its buffer, in order."""
        whole = count(self.buffer.dims) == count(self.target.dims) and self.target.offset == 0
        return whole and self.target.strides == contiguous(self.target.dims)


@dataclass(frozen=True)
class Step:
    """A root in a nest."""

    root: Root
    level: int
    """In which pass over a row it is computed."""
    once: bool
    """Whether its places are the rows, so that it is computed once for each, before that pass."""

    @property
    def per_row(self) -> bool:
        """Whether it gives a number for each row."""
        return self.once or self.root.how is not None


@dataclass
class Nest:
    """Steps that share loops over these places."""

    dims: Dims
    inner: frozenset[int] | None
    """The axes that rows are swept along; None so long as nothing is reduced, when any would do."""
    steps: list[Step] = field(default_factory=list)

    @property
    def outer(self) -> list[int]:
        """The axes whose places are rows."""
        return [axis for axis in range(len(self.dims)) if axis not in (self.inner or ())]

    @property
    def swept(self) -> list[int]:
        """The axes that rows are swept along, in order."""
        return sorted(self.inner or ())

    @property
    def passes(self) -> int:
        """How often a row is swept."""
        return 1 + max(step.level for step in self.steps)

    @property
    def across(self) -> bool:
        """Whether lanes go across rows, because the last axis is none that is swept."""
        return self.inner is not None and len(self.dims) - 1 not in self.inner

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, which shares its loops with nothing."""
        return self.steps[0].root.how == "Dot"

    @property
    def strides(self) -> bool:
        """Whether some access goes along the last axis, as lanes do, in steps through memory."""
        return not self.is_product and any(_strides(view, places, len(self.dims) - 1) for view, places in _all(self))

    @property
    def turned(self) -> int | None:
        """The axis along which elements lie in order where they do not along the last, if nothing is reduced."""
        if self.inner is not None or self.is_product:
            return None
        last = len(self.dims) - 1
        turned = (view for view, places in _all(self) if _strides(view, places, last) and 1 in view.strides)
        return next((view.strides.index(1) for view in turned), None)

    def crosses(self, buffer: Buffer) -> bool:
        """Whether a later pass reads what an earlier one wrote."""
        step = self.maker(buffer)
        readers = (s for s in self.steps if any(view.buffer is buffer for view in views_of(s.root.value)))
        return step is not None and any(reader.level > step.level for reader in readers)

    def maker(self, buffer: Buffer) -> Step | None:
        """The step that writes a buffer."""
        return next((step for step in self.steps if step.root.buffer is buffer), None)


def live(roots: Sequence[Root]) -> list[Root]:
    """Those that an output needs."""
    needed: set[Buffer] = set()
    kept = []
    for root in reversed(roots):
        if root.buffer.kind == "output" or root.buffer in needed:
            kept.append(root)
            needed |= {view.buffer for view in views_of(root.value)}
    return kept[::-1]


def nests_of(roots: Sequence[Root], expressions: Expressions) -> list[Nest]:
    """Roots, in the order of their dependencies, gathered into as few nests as may be."""
    nests: list[Nest] = []
    for root in roots:
        found = (nest for nest in _candidates(nests, root) if not nest.is_product and root.how != "Dot")
        if not any(_join(nest, root) or _join_in_pieces(nest, root, expressions) for nest in found):
            inner = root.reduced if root.how else None
            nests.append(Nest(root.value.dims, inner, [Step(root, 0, once=False)]))
    return nests


def _candidates(nests: Sequence[Nest], root: Root) -> Iterator[Nest]:
    """From the last nest back to one that a root depends on."""
    read = {view.buffer for view in views_of(root.value)}
    for nest in reversed(nests):
        yield nest
        if any(step.root.buffer in read or step.root.buffer is root.buffer for step in nest.steps):
            return


def _join(nest: Nest, root: Root) -> bool:
    """Put a root into a nest, if its places are those of the nest and it needs nothing from another row."""
    rows = tuple(nest.dims[axis] for axis in nest.outer)
    if root.value.dims == nest.dims and (not root.how or nest.inner in (None, root.reduced)):
        inner, once = (root.reduced if root.how else nest.inner), False
    elif nest.inner and not root.how and root.value.dims == rows:
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
    """Put a root into the nest whose rows it reads in another shape: the axes of both are split until they agree."""
    if root.how or nest.inner is None or not any(nest.maker(view.buffer) for view in views_of(root.value)):
        return False
    pieces = common_pieces(nest.dims, root.value.dims)
    if pieces is None:
        return False
    try:
        finer = nest
        for axis in reversed(range(len(nest.dims))):
            finer = _split(finer, axis, pieces[0][axis], expressions)
        value, target = root.value, root.target
        for axis in reversed(range(len(root.value.dims))):
            value = expressions.split(value, axis, pieces[1][axis])
            target = cast(View, expressions.split(target, axis, pieces[1][axis]))
    except CannotView:
        return False
    if not _join(finer, replace(root, value=value, target=target)):
        return False
    nest.dims, nest.inner, nest.steps = finer.dims, finer.inner, finer.steps
    return True


def _level(nest: Nest, root: Root, once: bool) -> int | None:
    """In which pass a root can be computed; None if it needs what other rows compute."""
    if nest.maker(root.buffer) is not None:
        return None
    if any(nest.maker(buffer) for buffer in gathered(root.value)):
        return None
    level = 0
    for view in views_of(root.value):
        step = nest.maker(view.buffer)
        if step is None:
            continue
        if not step.root.fills or (once and not step.per_row) or view.offset != 0 or view.guards:
            return None
        if view.strides != _own_place(nest, step, once):
            return None
        level = max(level, step.level + (step.root.how is not None))
    return level


def _own_place(nest: Nest, step: Step, once: bool) -> Dims:
    """The strides by which a step's result is read at the same place, or in the same row."""
    if not step.per_row:
        return contiguous(nest.dims)
    rows = contiguous([nest.dims[axis] for axis in nest.outer])
    if once:
        return rows
    by_axis = dict(zip(nest.outer, rows, strict=True))
    return tuple(by_axis.get(axis, 0) for axis in range(len(nest.dims)))


def merged(nest: Nest, expressions: Expressions) -> Nest:
    """The same with neighbouring axes made one wherever every access allows, so that loops are long."""
    axis = 0
    while axis + 1 < len(nest.dims):
        if _mergeable(nest, axis):
            nest = _merge(nest, axis, expressions)
        else:
            axis += 1
    return nest


def _accesses(nest: Nest, step: Step) -> Iterator[tuple[View, list[int]]]:
    """The views of a step, each with the axes of the nest that it goes over."""
    places = nest.outer if step.once else list(range(len(nest.dims)))
    for view in views_of(step.root.value):
        yield view, places
    yield step.root.target, nest.outer if step.per_row else places


def _all(nest: Nest) -> Iterator[tuple[View, list[int]]]:
    return (access for step in nest.steps for access in _accesses(nest, step) if access[0].buffer.kind != "places")


def _strides(view: View, places: Sequence[int], last: int) -> bool:
    return last in places and view.strides[places.index(last)] not in (0, 1)


def _mergeable(nest: Nest, axis: int) -> bool:
    if (axis in nest.outer) != (axis + 1 in nest.outer):
        return False
    for step in nest.steps:
        for view, places in _accesses(nest, step):
            if axis in places:
                at = places.index(axis)
                if view.strides[at] != dim_of(view.strides[at + 1] * nest.dims[axis + 1]):
                    return False
                if any(guard.axis in (at, at + 1) for guard in view.guards):
                    return False
    return True


def _merge(nest: Nest, axis: int, expressions: Expressions) -> Nest:
    joined = dim_of(nest.dims[axis] * nest.dims[axis + 1])
    dims = (*nest.dims[:axis], joined, *nest.dims[axis + 2 :])
    return _with_axis(nest, axis, expressions.merge, lambda a: [a - (a > axis)], dims)


def _split(nest: Nest, axis: int, pieces: Dims, expressions: Expressions) -> Nest:
    def moved(a: int) -> Sequence[int]:
        return range(axis, axis + len(pieces)) if a == axis else [a + (len(pieces) - 1) * (a > axis)]

    dims = (*nest.dims[:axis], *pieces, *nest.dims[axis + 1 :])
    return _with_axis(nest, axis, lambda value, at: expressions.split(value, at, pieces), moved, dims)


def _with_axis(
    nest: Nest, axis: int, change: Callable[[Value, int], Value], moved: Callable[[int], Sequence[int]], dims: Dims
) -> Nest:
    """The same with every access changed at an axis; `moved` says which axes an axis has become."""

    def seen(value: Value, places: Sequence[int]) -> Value:
        return change(value, places.index(axis)) if axis in places else value

    def all_moved(axes: frozenset[int]) -> frozenset[int]:
        return frozenset(new for old in axes for new in moved(old))

    def changed(step: Step) -> Step:
        places = nest.outer if step.once else list(range(len(nest.dims)))
        value = seen(step.root.value, places)
        target = seen(step.root.target, nest.outer if step.per_row else places)
        assert isinstance(target, View)
        return replace(step, root=replace(step.root, value=value, target=target, reduced=all_moved(step.root.reduced)))

    inner = None if nest.inner is None else all_moved(nest.inner)
    return Nest(dims, inner, [changed(step) for step in nest.steps])


def count(dims: Sequence[Dim]) -> Dim:
    """How many places there are."""
    product: Dim = 1
    for dim in dims:
        product = dim_of(product * dim)
    return product
