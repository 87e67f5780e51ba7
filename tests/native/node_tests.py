"""The node tests that come with onnx, as models whose parameters are constants.

`python -m tests.native.node_tests` compares all of them, with fixed sizes and with symbols.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
from onnx import numpy_helper

from sardonyx.native.lower import TABLE
from sardonyx.native.table import TYPES
from tests.native.running import Together, difference, inferred, run, session_of

_PARAMETERS = {
    **{f"Reduce{kind}": (1,) for kind in ("Sum", "Mean", "Max", "Min", "Prod", "SumSquare", "L1", "L2")},
    **{f"Reduce{kind}": (1,) for kind in ("LogSum", "LogSumExp")},
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 2, 3),
    "Split": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "OneHot": (1,),
    "Range": (0, 1, 2),
    "Dropout": (1, 2),
}
"""Inputs that a graph has as constants: sizes, axes, amounts."""

_OLDEST = 13
"""The same operators may be those of an earlier opset; lowerings are of this one and later."""


@dataclass(frozen=True)
class Case:
    """A node, what it is given, and what it should give."""

    name: str
    model: onnx.ModelProto
    feeds: dict[str, np.ndarray]
    expected: list[np.ndarray]

    @property
    def node(self) -> onnx.NodeProto:
        return self.model.graph.node[0]


@cache
def cases() -> tuple[Case, ...]:
    """Every case of an operator that has a lowering."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return tuple(_cases(collect_testcases(None)))


def _cases(found: list[onnx.backend.test.case.test_case.TestCase]) -> Iterator[Case]:
    for test in found:
        nodes = test.model.graph.node
        values = (*test.model.graph.input, *test.model.graph.output)
        if len(nodes) == 1 and (nodes[0].domain, nodes[0].op_type) in TABLE and all(map(_is_claimed, values)):
            given, expected = (list(map(_array, side)) for side in test.data_sets[0])
            feeds = dict(zip((x.name for x in test.model.graph.input), given, strict=True))
            yield _with_parameters(test.name, test.model, feeds, expected)


def _is_claimed(value: onnx.ValueInfoProto) -> bool:
    """Whether kernels know the type."""
    return value.type.HasField("tensor_type") and value.type.tensor_type.elem_type in TYPES


def _array(value: object) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _with_parameters(
    name: str, model: onnx.ModelProto, feeds: dict[str, np.ndarray], expected: list[np.ndarray]
) -> Case:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    node = made.graph.node[0]
    fixed = {node.input[i] for i in _PARAMETERS.get(node.op_type, ()) if i < len(node.input)} - {""}
    version = made.opset_import[0].version
    if version < _OLDEST and onnx.defs.get_schema(node.op_type, _OLDEST).since_version <= version:
        made.opset_import[0].version = _OLDEST
    for x in [x for x in made.graph.input if x.name in fixed]:
        made.graph.input.remove(x)
        made.graph.initializer.append(numpy_helper.from_array(feeds[x.name], x.name))
    return Case(name, inferred(made), {k: v for k, v in feeds.items() if k not in fixed}, expected)


def symbolic(case: Case) -> Case:
    """The same with a symbol for every size of every input, one for each number: equal sizes are taken for equal."""
    made = onnx.ModelProto()
    made.CopyFrom(case.model)
    for x in made.graph.input:
        for dim in x.type.tensor_type.shape.dim:
            if dim.dim_value > 1:
                dim.dim_param = f"n{dim.dim_value}"
    for x in (*made.graph.output, *made.graph.value_info):
        x.type.tensor_type.ClearField("shape")
    return Case(case.name, inferred(made), case.feeds, case.expected)


def compare(chosen: Sequence[Case], *, quickly: bool) -> list[str]:
    """What is wrong with the results of the cases that can be kernels."""
    together = Together()
    taken = [case for case in chosen if together.add(case.name, case.model) is None]
    together.build(quickly=quickly)
    return [f"{case.name}: {why}" for case in taken if (why := _wrong(together, case)) is not None]


def _wrong(together: Together, case: Case) -> str | None:
    """How a result differs from what is expected, or, where that is rounded, from onnxruntime's."""
    found = together.run(case.name, case.feeds)
    for index, (a, b) in enumerate(zip(found, case.expected, strict=True)):
        differs = difference(a, b)
        if differs is not None and difference(a, run(session_of(case.model), case.feeds)[index]) is not None:
            return differs
    return None


def main() -> None:
    for what, chosen in {"fixed": list(cases()), "symbolic": list(map(symbolic, cases()))}.items():
        failures = [line for at in range(0, len(chosen), 100) for line in compare(chosen[at : at + 100], quickly=False)]
        print(f"{what}: {len(chosen)} cases, {len(failures)} wrong", *failures, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
