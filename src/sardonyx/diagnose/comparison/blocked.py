"""Map values in ONNX Runtime's blocked channel layout (NCHWc) to the values of the model, and unblock them.

On some processors ONNX Runtime replaces convolutions and pooling by operators of the domain com.microsoft.nchwc, which
read and write blocks of channels, and renames their outputs. Such a node is named after the output of the node that it
replaces; an Add and an activation that are fused into it later do not change that name. Additions, products,
concatenations and activations between them are unchanged, and compute blocks from blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_DOMAIN = "com.microsoft.nchwc"
_NAMED = "_nchwc"
_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid"})
_FOLDED = _ACTIVATIONS | {"BatchNormalization", "Add", "Sub", "Mul", "Div", "Identity", "Dropout"}
"""Operators that ONNX Runtime folds into a convolution before it changes the layout, if they have constant operands."""
_REPLACED = {"Conv": ("Conv", "FusedConv", "BatchNormalization"), "Upsample": ("Upsample", "Resize")}
"""Operators that a blocked operator replaces, if the name differs."""
_BEFORE = ("Pad", "Identity", "Dropout")
"""Operators that ONNX Runtime removes before a convolution."""
_PADDING = 64
"""Upper bound of the channels that are added to fill a block."""


def show_blocked(optimized: ir.Model, original: ir.Model) -> dict[str, str]:
    """Append nodes to ONNX Runtime's optimized model that convert blocked values to the normal layout.

    Their outputs have the names of the original model; other values do not change. Returns the original name of each
    blocked value; values that cannot be identified reliably are left out.
    """
    known = _Blocked(optimized, original).known
    names = {str(value.name) for value in _values(optimized.graph)}
    for blocked, value in known.items():
        if value.name not in names:
            _append(optimized.graph, blocked, value)
    return {str(blocked.name): str(value.name) for blocked, value in known.items()}


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _append(graph: ir.Graph, blocked: ir.Value, value: ir.Value) -> None:
    node = ir.node("ReorderOutput", [blocked], {"channels": _channels(value)}, domain=_DOMAIN)
    output = node.outputs[0]
    output.name, output.shape, output.type = value.name, value.shape, value.type
    graph.append(node)


def _channels(value: ir.Value) -> int | None:
    """Return the number of channels of a value that may be blocked; None if it cannot be."""
    channels = value.shape[1] if value.shape is not None and len(value.shape) == 4 else None
    return channels if isinstance(channels, int) and value.dtype is not None else None


class _Blocked:
    """Maps blocked values of the optimized model to values of the original model."""

    def __init__(self, optimized: ir.Model, original: ir.Model) -> None:
        self._graph = original.graph
        self._values = {str(value.name): value for value in _values(original.graph)}
        self._nodes = {str(node.name): node for node in original.graph if node.name}
        self.known: dict[ir.Value, ir.Value] = {}
        for node in optimized.graph:  # values that are also read unblocked keep their names
            if node.domain == _DOMAIN and node.op_type == "ReorderOutput" and not _is_channels_last(node):
                self._add(node.inputs[0], self._values.get(str(node.outputs[0].name)))
        for node in optimized.graph:
            if node.outputs[0] not in self.known:
                self._add(node.outputs[0], self._computed(node))

    def _add(self, blocked: ir.Value | None, value: ir.Value | None) -> None:
        if blocked is not None and value is not None and _channels(value) is not None:
            self.known[blocked] = value

    def _original(self, value: ir.Value | None) -> ir.Value | None:
        """Return the original value of one of the optimized model; None if it is not known."""
        if value is None:
            return None
        return self.known.get(value, self._values.get(str(value.name)))

    def _computed(self, node: ir.Node) -> ir.Value | None:
        """Return the original of a node's blocked output; None if it is not blocked or not certain."""
        if node.domain != _DOMAIN:
            return self._unchanged(node) if any(x in self.known for x in node.inputs) else None
        if node.op_type == "ReorderInput":
            return None if _is_channels_last(node) else self._original(node.inputs[0])
        return None if node.op_type == "ReorderOutput" else self._replaced(node)

    def _unchanged(self, node: ir.Node) -> ir.Value | None:
        """Return the original output of a node that was not replaced, if its inputs are the same."""
        before = self._nodes.get(str(node.name))
        if before is None or (before.op_type, before.domain) != (node.op_type, node.domain):
            return None
        read = [self._original(x) for x in node.inputs]
        same = len(read) == len(before.inputs) and all(a is b for a, b in zip(read, before.inputs, strict=True))
        return before.outputs[0] if same else None

    def _replaced(self, node: ir.Node) -> ir.Value | None:
        """Return the original output of a blocked operator: by its name, then by what was fused into it."""
        name = str(node.name)
        value = self._values.get(name.removesuffix(_NAMED)) if name.endswith(_NAMED) else None
        if value is None or not self._computes(node, value):
            return None
        has_sum = len(node.inputs) > 3 and node.inputs[3] is not None
        if has_sum:
            value = self._added(value, self._original(node.inputs[3]))
        activation = node.attributes.get_string("activation")
        if value is None or not activation:
            return value
        producer = value.producer()
        is_active = not has_sum and producer is not None and producer.op_type == activation
        return value if is_active else self._reader(value, (activation,))

    def _computes(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node computes a value from its inputs, with only constants folded into it."""
        read, kinds = self._original(node.inputs[0]), _REPLACED.get(node.op_type, (node.op_type,))
        if node.op_type == "Conv" and not _fits(node.inputs[1], value):
            return False
        above = value.producer()
        while above is not None:
            source = above.inputs[0]
            if above.op_type in kinds and (read is None or _is_from(source, read)):
                return True
            varying = [x for x in above.inputs if x is not None and x.const_value is None]
            if above.op_type not in _FOLDED or len(varying) != 1:
                return False
            above = varying[0].producer()
        return False

    def _added(self, value: ir.Value, other: ir.Value | None) -> ir.Value | None:
        """Return the sum of two values, if nothing else reads the first."""
        total = self._reader(value, ("Add", "Sum")) if other is not None else None
        producer = total.producer() if total is not None else None
        if producer is None or len(producer.inputs) != 2 or not any(x is other for x in producer.inputs):
            return None
        return total

    def _reader(self, value: ir.Value, kinds: Sequence[str]) -> ir.Value | None:
        """Return the output of the only node that reads a value, if its operator is one of these."""
        uses = [use.node for use in value.uses()]
        if value.is_graph_output() or len(uses) != 1 or uses[0].graph is not self._graph:
            return None
        return uses[0].outputs[0] if uses[0].op_type in kinds else None


def _is_channels_last(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("channels_last", 0))


def _fits(weight: ir.Value | None, value: ir.Value) -> bool:
    """Whether a convolution with this weight has as many channels as a value, except for padding of a block."""
    channels = _channels(value)
    size = weight.shape[0] if weight is not None and weight.shape is not None else None
    return channels is not None and isinstance(size, int) and 0 <= size - channels < _PADDING


def _is_from(value: ir.Value | None, read: ir.Value) -> bool:
    """Whether a value is another one, or computed from it by operators that ONNX Runtime removes."""
    while value is not None and value is not read:
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _BEFORE else None
    return value is read
