"""Which kernels ONNX Runtime's CUDA provider has: `python -m tests.ops.cuda_kernels FILE`, as
src/sardonyx/engines/cuda_kernels.txt.

The provider does not list them. So a model of one node is loaded for each operator, version and dtype, and ONNX Runtime
says which provider the node was given to. Needs a GPU and onnxruntime-gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx import defs, helper

OPSETS = range(18, 26)
CUDA = "CUDAExecutionProvider"
PREFERRED = ("tensor(float)", "tensor(float16)", "tensor(int64)", "tensor(int32)", "tensor(bool)", "tensor(uint8)")
ABSENT_TYPES = ("string", "complex64", "complex128", "int2", "uint2", "float8e8m0")
SKIPPED = frozenset({"If", "Loop", "Scan", "SequenceMap", "Constant", "Optional", "OptionalGetElement"})

_SHORT = {"float": "f32", "float16": "f16", "bfloat16": "bf16", "double": "f64", "bool": "b"}
_REQUIRED = {"to": 1, "kernel_shape": [1], "blocksize": 1, "equation": "i->i", "num_outputs": 1, "axis": 0}
"""Values of attributes that operators must have."""


def short(name: str) -> str:
    """A dtype as the table has it."""
    name = name.removeprefix("tensor(").removesuffix(")")
    return _SHORT.get(name) or name.replace("uint", "u").replace("int", "i").replace("float", "f")


def versions() -> Iterator[tuple[Any, range]]:
    """Every operator's schemas, with the opsets that each is of."""
    for name in sorted({schema.name for schema in defs.get_all_schemas() if not schema.domain}):
        schemas = sorted(
            (s for s in defs.get_all_schemas_with_history() if s.name == name and not s.domain),
            key=lambda schema: schema.since_version,
        )
        ends = [min(schema.since_version, OPSETS.stop) for schema in schemas[1:]] + [OPSETS.stop]
        for schema, end in zip(schemas, ends, strict=True):
            known = schema.since_version < OPSETS.stop and end > OPSETS.start
            if known and not schema.deprecated and name not in SKIPPED:
                yield schema, range(schema.since_version, end)


def supported(schema: Any, opsets: range) -> dict[str, list[str]] | None:
    """The dtypes of each type constraint that have a kernel on CUDA; None where the operator has none at all."""
    constraints = {c.type_param_str: _dense(c.allowed_type_strs) for c in schema.type_constraints}
    constraints = {name: types for name, types in constraints.items() if types}
    base = {name: next((t for t in PREFERRED if t in types), types[0]) for name, types in constraints.items()}
    opset = min(max(opsets.start, OPSETS.start), opsets.stop - 1)

    def alike(dtype: str) -> dict[str, str]:
        return {name: dtype if dtype in types else base[name] for name, types in constraints.items()}

    found = {
        name: [t for t in types if any(_runs_on_cuda(schema, some, opset) for some in ({**base, name: t}, alike(t)))]
        for name, types in constraints.items()
    }
    if not constraints:
        return {} if _runs_on_cuda(schema, {}, opset) else None
    return found if all(found.values()) else None


def _dense(types: Any) -> list[str]:
    plain = [t for t in sorted(types) if t.startswith("tensor(")]
    return [t for t in plain if t.removeprefix("tensor(").removesuffix(")") not in ABSENT_TYPES]


def _runs_on_cuda(schema: Any, types: Mapping[str, str], opset: int) -> bool:
    try:
        session = _session(_model(schema, types, opset))
    except Exception as error:
        if "NOT_IMPLEMENTED" in str(error) or "Provider type" in str(error):
            return False
        if "Exception during initialization" in str(error):  # of a kernel, which wants other attributes
            return True
        print(f"{schema.name} {opset} {dict(types)}: {str(error)[:160]}", file=sys.stderr)
        return False
    assigned = session._sess.get_provider_graph_assignment_info()
    nodes = [(group.ep_name, node.op_type) for group in assigned for node in group.get_nodes()]
    return (CUDA, schema.name) in nodes


def _session(model: onnx.ModelProto) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[CUDA, "CPUExecutionProvider"])


def _model(schema: Any, types: Mapping[str, str], opset: int) -> onnx.ModelProto:
    inputs = [
        _value(f"x{i}", formal, types)
        for i, formal in enumerate(schema.inputs)
        if formal.option != defs.OpSchema.FormalParameterOption.Optional
    ]
    outputs = [_value(f"y{i}", formal, types) for i, formal in enumerate(schema.outputs[: max(schema.min_output, 1)])]
    node = helper.make_node(
        schema.name, [x.name for x in inputs], [y.name for y in outputs], **_attributes(schema, types)
    )
    graph = helper.make_graph([node], "one", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _value(name: str, formal: Any, types: Mapping[str, str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, _number(types.get(formal.type_str, formal.type_str)), None)


def _attributes(schema: Any, types: Mapping[str, str]) -> dict[str, Any]:
    given = {name: _REQUIRED.get(name, 1) for name, attribute in schema.attributes.items() if attribute.required}
    result = _number(types.get(schema.outputs[0].type_str, "tensor(float)"))
    for name in {"to", "dtype", "output_dtype"} & schema.attributes.keys():
        given[name] = result
    if "hidden_size" in schema.attributes:
        given["hidden_size"] = 1
    if schema.name == "ConstantOfShape":
        given["value"] = helper.make_tensor("value", result, [1], [0])
    if schema.name == "Split" and "num_outputs" in schema.attributes:
        given["num_outputs"] = 1
    return given


def _number(dtype: str) -> int:
    """ONNX's number of a dtype."""
    return onnx.TensorProto.DataType.Value(dtype.removeprefix("tensor(").removesuffix(")").upper())


def main(path: Path) -> None:
    """Write the table."""
    onnxruntime.set_default_logger_severity(4)
    lines = [
        "# Kernels of ONNX Runtime's CUDA provider, which does not list them: operator, opsets, dtypes by constraint.",
        f"# Written by tests/ops/cuda_kernels.py with onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}.",
    ]
    for schema, opsets in versions():
        found = supported(schema, opsets)
        if found is not None:
            constraints = "".join(f" {name}={','.join(map(short, types))}" for name, types in found.items())
            lines.append(f"{schema.name} {opsets.start}-{opsets.stop - 1}{constraints}")
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
