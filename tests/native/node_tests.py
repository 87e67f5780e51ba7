"""The node tests that come with onnx, as models whose parameters are constants.

`python -m tests.native.node_tests` compares all of them, with fixed sizes and with symbols, as they are and with other
real numbers, and prints a table. With `--write` docs/native-operators.md is written if nothing is wrong.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper

from sardonyx.native.lower import TABLE
from sardonyx.native.table import TYPES
from tests.native.precise import Overflows, Precise, differences, precise
from tests.native.running import Together, difference, inferred, run, session_of

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "native-operators.md"

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
    retyped: bool = False
    """Whether it is of other real numbers than what is expected."""

    @property
    def node(self) -> onnx.NodeProto:
        return self.model.graph.node[0]

    @property
    def operator(self) -> str:
        """What it is a case of."""
        return self.node.op_type


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
    return Case(case.name, inferred(made), case.feeds, case.expected, case.retyped)


OTHERS: Mapping[str, tuple[int, type]] = {
    "float64": (TensorProto.DOUBLE, np.float64),
    "float16": (TensorProto.FLOAT16, np.float16),
    "bfloat16": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
}
"""What cases of float32 are tried with too: by name, as ONNX and as numpy have it."""
_COARSE = 2e-2
"""Of the largest number, for narrow types that are compared with what float32 gives."""
_ABOUT_TYPES = frozenset({"Cast", "CastLike", "QuantizeLinear", "DequantizeLinear"})


def retyped(case: Case, name: str) -> Case | None:
    """A case of float32 with other real numbers; None where there are none, or the operator does not take them."""
    kind, dtype = OTHERS[name]
    reals = [x for x in case.model.graph.input if x.type.tensor_type.elem_type == TensorProto.FLOAT]
    held = [x for x in case.model.graph.initializer if x.data_type == TensorProto.FLOAT]
    changed = {x.name for x in (*reals, *held)}
    if not reals or case.operator in _ABOUT_TYPES or not _takes(case, changed, _SPELLED[name]):
        return None
    made = onnx.ModelProto()
    made.CopyFrom(case.model)
    del made.graph.value_info[:]
    for x in made.graph.input:
        if x.name in changed:
            x.type.tensor_type.elem_type = kind
    for x in made.graph.initializer:
        if x.name in changed:
            x.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(x).astype(dtype), x.name))
    for x in made.graph.output:
        x.CopyFrom(onnx.ValueInfoProto(name=x.name))
    feeds = {x: array.astype(dtype) if x in changed else array for x, array in case.feeds.items()}
    known = inferred(made)
    if not all(x.HasField("type") for x in known.graph.output):
        return None
    return Case(case.name, known, feeds, case.expected, retyped=True)


_SPELLED = {"float64": "tensor(double)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}


def _takes(case: Case, changed: set[str], spelled: str) -> bool:
    """Whether the operator takes another type where it is given float32."""
    version = next(x.version for x in case.model.opset_import if x.domain == case.node.domain)
    schema = onnx.defs.get_schema(case.operator, version, case.node.domain)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    formals = (schema.inputs[min(i, len(schema.inputs) - 1)] for i, x in enumerate(case.node.input) if x in changed)
    return all(spelled in allowed.get(formal.type_str, ()) for formal in formals)


# What becomes kernels, and whether these are right


def refused(form: Callable[[Case], Case]) -> dict[str, str]:
    """By name, why cases are no kernels."""
    together = Together()
    found = ((case.name, together.add(case.name, form(case).model)) for case in cases())
    return {name: why for name, why in found if why is not None}


def compare(chosen: Sequence[Case], *, quickly: bool) -> list[str]:
    """What is wrong with the results of the cases that can be kernels."""
    together = Together()
    taken = [case for case in chosen if together.add(case.name, case.model) is None]
    if taken:
        together.build(quickly=quickly)
    return [f"{case.name}: {why}" for case in taken if (why := _wrong(together, case)) is not None]


def _wrong(together: Together, case: Case) -> str | None:
    """How a result differs from what is expected, or, where that is rounded, from onnxruntime's or from float64."""
    try:
        found = together.run(case.name, case.feeds)
        if case.retyped:
            return next((why for why, _ in differences(found, _precise(case)) if why), None)
    except Overflows:
        return None
    except TypeError:  # onnx's own evaluator cannot run it in float64
        pairs = zip(found, case.expected, strict=True)
        return next(
            (why for a, b in pairs if (why := difference(a, b.astype(a.dtype), tolerance=_COARSE)) is not None), None
        )
    for index, (a, b) in enumerate(zip(found, case.expected, strict=True)):
        differs = difference(a, b)
        if differs is not None and difference(a, run(session_of(case.model), case.feeds)[index]) is not None:
            return differs
    return None


def _precise(case: Case) -> Precise:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return precise(case.model, case.feeds)


def forms() -> dict[str, list[Case]]:
    """Every form of every case that is compared: sizes as they are or symbols, and all kinds of real numbers."""
    found = {"as they are": list(cases())}
    for name in OTHERS:
        found[name] = [made for case in cases() if (made := retyped(case, name)) is not None]
    return found | {f"{name}, symbols": list(map(symbolic, of)) for name, of in found.items()}


# The document

_INTRODUCTION = """# Operators that become kernels

Made by `python -m tests.native.node_tests --write`, with onnx {onnx}; a test compares it with what the code does.

Every node test that comes with onnx, of an operator that has a lowering and of numbers that kernels compute with, is
run as a kernel: with its sizes, and with a name for each size that is not one, which is then read from the inputs of a
call. Results are what the test expects, or, where that is rounded, onnxruntime's. Cases of float32 are repeated with
the other types that the operator takes, and compared with float64. Operators of `com.microsoft` have no node tests;
tests/native compares them with onnxruntime.

"Types" are the real numbers that an operator is tried with; some have cases of integers and booleans alone. float16 and
bfloat16 are computed in float32, and rounded where they are written.
"""


def document() -> str:
    """What the table of lowerings can do: operators, types, cases, and what is refused why."""
    fixed, with_symbols = refused(lambda case: case), refused(symbolic)
    lines = [_INTRODUCTION.format(onnx=onnx.__version__)]
    lines += ["| operator | types | cases | kernels | kernels with symbols |", "|---|---|---|---|---|"]
    by_operator = defaultdict(list)
    for case in cases():
        by_operator[case.operator].append(case)
    for name in sorted(by_operator):
        found = by_operator[name]
        counts = [len(found), *(sum(case.name not in no for case in found) for no in (fixed, with_symbols))]
        lines.append(f"| {name} | {_types_of(found)} | " + " | ".join(map(str, counts)) + " |")
    elsewhere = sorted(
        {f"{op} ({domain})" if domain else op for domain, op in TABLE if domain or op not in by_operator}
    )
    lines += ["", "Without node tests: " + ", ".join(elsewhere) + "."]
    lines += ["", "## Left to onnxruntime", "", *_reasons(fixed)]
    only = {name: why for name, why in with_symbols.items() if name not in fixed}
    lines += ["", "## Left to onnxruntime where every size is a symbol", "", *_reasons(only)]
    return "\n".join(lines) + "\n"


def _types_of(found: Sequence[Case]) -> str:
    """The real numbers that some case of an operator is a kernel with."""
    reals = [case for case in found if retyped(case, "float64") or _is_of(case, TensorProto.FLOAT)]
    taken = ["float32"] if any(Together().add("", case.model) is None for case in reals[:3]) else []
    for name in OTHERS:
        made = [x for case in reals[:3] if (x := retyped(case, name)) is not None]
        taken += [name] * any(Together().add("", case.model) is None for case in made)
    return ", ".join(taken) or "–"


def _is_of(case: Case, kind: int) -> bool:
    return any(x.type.tensor_type.elem_type == kind for x in (*case.model.graph.input, *case.model.graph.output))


def _reasons(why: Mapping[str, str]) -> Iterator[str]:
    """A table of reasons, each with the cases it is given for."""
    by_reason = defaultdict(list)
    for name, reason in why.items():
        by_reason[reason].append(name.removeprefix("test_"))
    yield from ("| why | cases |", "|---|---|")
    for reason in sorted(by_reason):
        yield f"| {reason} | {', '.join(sorted(by_reason[reason]))} |"


def main(*, write: bool = False) -> int:
    wrong: list[str] = []
    of_operator: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for form, chosen in forms().items():
        failures = [line for at in range(0, len(chosen), 100) for line in compare(chosen[at : at + 100], quickly=False)]
        print(f"{form}: {len(chosen)} cases, {len(failures)} wrong", *failures, sep="\n  ", flush=True)
        wrong += failures
        for case in chosen:
            of_operator[case.operator][form] += 1
    for name, counts in sorted(of_operator.items()):
        print(f"{name:28}", ", ".join(f"{count} {form}" for form, count in counts.items()))
    if write and not wrong:
        DOCUMENT.write_text(document())
    print(f"{len(of_operator)} operators, {sum(map(Counter.total, of_operator.values()))} cases in all forms, ", end="")
    print(f"{len(wrong)} wrong; onnx {onnx.__version__}, onnxruntime {onnxruntime.__version__}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(write="--write" in sys.argv))
