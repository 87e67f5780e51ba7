"""A summary of a model: inputs, outputs, operators, largest weights; and a list of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
from rich.filesize import decimal

from sardonyx.cli._feeds import dims_of, format_dims, inputs_of
from sardonyx.cli._messages import format_counts

_LARGEST = 10
_SHORT = 8
"""Elements up to which a tensor is printed."""


def summary(model: ir.Model) -> dict[str, Any]:
    """Return a summary of a model as plain data."""
    weights = {str(name): value for name, value in model.graph.initializers.items() if value.const_value is not None}
    operators = Counter(map(_operator, _all_nodes(model)))
    return {
        "ir_version": model.ir_version,
        "opset": model.opset_imports.get(""),
        "domains": {domain or "ai.onnx": version for domain, version in model.opset_imports.items()},
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))),
        "inputs": [_value(value) for value in inputs_of(model)],
        "outputs": [_value(value) for value in model.graph.outputs],
        "nodes": operators.total(),
        "operators": dict(operators.most_common()),
        "functions": {f.name: {"domain": f.domain, "nodes": len(f)} for f in model.functions.values()},
        "weights": len(weights),
        "weight_bytes": sum(map(_bytes, weights.values())),
        "weights_by_dtype": _bytes_by_dtype(list(weights.values())),
        "largest": [
            {**_value(value), "bytes": _bytes(value)}
            for value in sorted(weights.values(), key=lambda x: (-_bytes(x), str(x.name)))[:_LARGEST]
        ],
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """Format a summary."""
    domains = ", ".join(f"{name} {version}" for name, version in summary["domains"].items())
    by_dtype = "".join(f"; {dtype} {decimal(size)}" for dtype, size in summary["weights_by_dtype"].items())
    return [
        f"opset      {domains}; IR version {summary['ir_version']}; by {summary['producer'] or 'an unknown producer'}",
        *_with_heading("inputs", [_format_value(x) for x in summary["inputs"]]),
        *_with_heading("outputs", [_format_value(x) for x in summary["outputs"]]),
        f"nodes      {summary['nodes']}: {format_counts(summary['operators'])}",
        *_with_heading(
            "functions", [f"{x['domain']}.{name}, {x['nodes']} nodes" for name, x in summary["functions"].items()]
        ),
        f"weights    {summary['weights']}, {decimal(summary['weight_bytes'])}{by_dtype}",
    ]


def nodes(model: ir.Model) -> list[dict[str, Any]]:
    """Return every node in order; nodes of subgraphs follow theirs, those of functions come last."""
    return [
        {
            "name": str(node.name or ""),
            "operator": _operator(node),
            "inputs": ["" if x is None else str(x.name) for x in node.inputs],
            "outputs": [_value(x) for x in node.outputs],
            "attributes": {name: _attribute(x) for name, x in node.attributes.items()},
        }
        for node in _all_nodes(model)
    ]


def node_line(node: dict[str, Any]) -> str:
    """Format a node: outputs, operator, inputs, attributes."""
    outputs = ", ".join(_format_value(x) for x in node["outputs"])
    attributes = "".join(f", {name}={value}" for name, value in node["attributes"].items())
    return f"{outputs} = {node['operator']}({', '.join(node['inputs'])}{attributes})"


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _operator(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _value(value: ir.Value) -> dict[str, Any]:
    return {"name": str(value.name), "dtype": _dtype(value), "shape": dims_of(value)}


def _dtype(value: ir.Value) -> str | None:
    """Return the dtype's name in torch and numpy."""
    name = value.dtype.name.lower() if value.dtype else None
    return {"float": "float32", "double": "float64"}.get(name, name) if name else None


def _format_value(value: dict[str, Any]) -> str:
    return f"{value['name']}: {value['dtype'] or '?'}{format_dims(value['shape'])}"


def _attribute(attribute: ir.Attr) -> Any:
    """Return the value of an attribute; graphs and large tensors are abbreviated."""
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "{…}"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return tensor.numpy().tolist() if tensor.size <= _SHORT else f"{tensor.dtype.name.lower()}{list(tensor.shape)}"
    value = attribute.value
    return list(value) if isinstance(value, (list, tuple)) else value if isinstance(value, (int, float)) else str(value)


def _bytes(value: ir.Value) -> int:
    return value.const_value.nbytes if value.const_value is not None else 0


def _bytes_by_dtype(weights: list[ir.Value]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for value in weights:
        sizes[_dtype(value) or "?"] += _bytes(value)
    return dict(sizes.most_common())


def _with_heading(heading: str, rows: list[str]) -> list[str]:
    """Indent lines, with a heading before the first."""
    return [f"{heading if index == 0 else '':<10} {line}" for index, line in enumerate(rows)]
