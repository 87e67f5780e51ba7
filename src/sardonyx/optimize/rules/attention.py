"""Attention: layouts and repeated heads that the operator handles by itself."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.rule import Match, rule_at

_BSNH_TO_BNSH = [0, 2, 1, 3]


def _unturned(value: ir.Value | None) -> ir.Value | None:
    """Where a value is (batch, heads, length, width) transposed from (batch, length, heads, width), the latter."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Transpose":
        return None
    return producer.inputs[0] if list(producer.attributes["perm"].value) == _BSNH_TO_BNSH else None


@rule_at("Attention")
def attention_in_rows(m: Match) -> ir.Value:
    """Attention over transposed heads, its result transposed back = Attention over rows (batch, length, heads·width).

    The operator splits heads itself, so the Transpose of each operand and of the result go away.
    """
    if m.node.domain or len(m.dims(m.result)) != 4 or len(m.node.outputs) != 1:
        m.require(False, "already in rows")
    sources = [_unturned(x) for x in m.node.inputs[:3]]
    m.require(all(s is not None for s in sources), "an operand is not transposed from rows")
    readers = list(m.result.uses())
    m.require(not m.result.is_graph_output() and bool(readers), "the graph returns it")
    m.require(all(_turns_back(use.node) for use in readers), "the result is not transposed back")
    heads = [m.dims(s)[2] for s in sources if s is not None]
    m.require(all(isinstance(h, int) for h in heads), "a symbolic number of heads")
    rows = [_in_rows(m, s) for s in sources if s is not None]
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    attributes |= {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    y = m.g.node("Attention", [*rows, *m.node.inputs[3:]], **attributes)
    batch, count, length, width = m.dims(m.result)
    m.g.shaped(y, [batch, length, count * width])
    return m.g.transpose(m.g.reshape(y, [batch, length, count, width]), _BSNH_TO_BNSH)


def _turns_back(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and list(node.attributes["perm"].value) == _BSNH_TO_BNSH


def _in_rows(m: Match, x: ir.Value) -> ir.Value:
    batch, length, heads, width = m.dims(x)
    return m.g.reshape(x, [batch, length, heads * width])


@rule_at("Attention")
def attention_repeats_heads(m: Match) -> ir.Value:
    """Keys and values repeated for each group of heads need no repeating: Attention groups heads itself."""
    sources = [_unrepeated(m, x) for x in m.node.inputs[1:3]]
    m.require(all(s is not None for s in sources), "keys and values are not repeated")
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    return m.g.node("Attention", [m.node.inputs[0], *sources, *m.node.inputs[3:]], **attributes)


def _unrepeated(m: Match, value: ir.Value | None) -> ir.Value | None:
    """What Reshape(Expand(x)) repeats for each group of heads: x is (batch, heads, 1, length, width)."""
    joined = value.producer() if value is not None else None
    repeated = joined.inputs[0].producer() if joined is not None and joined.inputs[0] is not None else None
    if joined is None or repeated is None or (joined.op_type, repeated.op_type) != ("Reshape", "Expand"):
        return None
    source = repeated.inputs[0]
    before, after = m.dims(source) if source is not None else (), m.dims(repeated.outputs[0])
    if source is None or len(before) != 5 or len(after) != 5 or len(m.dims(joined.outputs[0])) != 4:
        return None
    batch, heads, single, length, width = before
    if single != 1 or (*after[:2], *after[3:]) != (batch, heads, length, width):
        return None
    return m.g.reshape(source, [batch, heads, length, width])
