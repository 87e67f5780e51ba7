"""Values that ONNX Runtime keeps in blocks of channels: which value of the model each one is, and how it is fetched.

Where the processor gains by it, ONNX Runtime replaces convolutions and pools by operators of a domain of its own, which
read and write blocks of channels, and names what they compute anew. Such a node is named for the value that the one it
replaces computes; an Add and an activation that it takes in later leave that name. Additions, products, concatenations
and activations between them stay what they are, and compute blocks from blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_DOMAIN = "com.microsoft.nchwc"
_NAMED = "_nchwc"
_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid"})
_FOLDED = _ACTIVATIONS | {"BatchNormalization", "Add", "Sub", "Mul", "Div", "Identity", "Dropout"}
"""What ONNX Runtime folds into a convolution before it lays it out anew, if its other operands are constants."""
_REPLACED = {"Conv": ("Conv", "FusedConv", "BatchNormalization"), "Upsample": ("Upsample", "Resize")}
"""What an operator on blocks takes the place of, where that has another name."""
_BEFORE = ("Pad", "Identity", "Dropout")
"""What ONNX Runtime drops between a convolution and what it reads."""
_PADDING = 64
"""Channels that are added to fill a block are fewer than this."""


def show_blocked(made: ir.Model, given: ir.Model) -> dict[str, str]:
    """Append to the model that ONNX Runtime made of a given one nodes that compute its blocked values without blocks.

    They have the names that the given model has for them, and change nothing of what is computed. What is returned is
    for each blocked value the name it is known by. One that cannot be told for certain is left out.
    """
    known = _Blocked(made, given).known
    had = {str(value.name) for value in _values(made.graph)}
    for blocked, value in known.items():
        if value.name not in had:
            _append(made.graph, blocked, value)
    return {str(blocked.name): str(value.name) for blocked, value in known.items()}


def _values(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]


def _append(graph: ir.Graph, blocked: ir.Value, value: ir.Value) -> None:
    node = ir.node("ReorderOutput", [blocked], {"channels": _channels(value)}, domain=_DOMAIN)
    output = node.outputs[0]
    output.name, output.shape, output.type = value.name, value.shape, value.type
    graph.append(node)


def _channels(value: ir.Value) -> int | None:
    """The channels of a value that may be in blocks, None of one that may not."""
    found = value.shape[1] if value.shape is not None and len(value.shape) == 4 else None
    return found if isinstance(found, int) and value.dtype is not None else None


class _Blocked:
    """For each blocked value of a model that ONNX Runtime made, the value of the given model that it is."""

    def __init__(self, made: ir.Model, given: ir.Model) -> None:
        self._graph = given.graph
        self._values = {str(value.name): value for value in _values(given.graph)}
        self._nodes = {str(node.name): node for node in given.graph if node.name}
        self.known: dict[ir.Value, ir.Value] = {}
        for node in made.graph:  # what is read without blocks too has its name already
            if node.domain == _DOMAIN and node.op_type == "ReorderOutput" and not _is_channels_last(node):
                self._note(node.inputs[0], self._values.get(str(node.outputs[0].name)))
        for node in made.graph:
            if node.outputs[0] not in self.known:
                self._note(node.outputs[0], self._computed(node))

    def _note(self, blocked: ir.Value | None, value: ir.Value | None) -> None:
        if blocked is not None and value is not None and _channels(value) is not None:
            self.known[blocked] = value

    def _named(self, value: ir.Value | None) -> ir.Value | None:
        """The value of the given model that one of the made model is; None where that is not known."""
        if value is None:
            return None
        return self.known.get(value, self._values.get(str(value.name)))

    def _computed(self, node: ir.Node) -> ir.Value | None:
        """The value that a node computes in blocks; None of one that does not, or where it is not certain."""
        if node.domain != _DOMAIN:
            return self._kept(node) if any(x in self.known for x in node.inputs) else None
        if node.op_type == "ReorderInput":
            return None if _is_channels_last(node) else self._named(node.inputs[0])
        return None if node.op_type == "ReorderOutput" else self._replaced(node)

    def _kept(self, node: ir.Node) -> ir.Value | None:
        """What an operator computes that stayed what it was, if it reads what it read."""
        before = self._nodes.get(str(node.name))
        if before is None or (before.op_type, before.domain) != (node.op_type, node.domain):
            return None
        read = [self._named(x) for x in node.inputs]
        same = len(read) == len(before.inputs) and all(a is b for a, b in zip(read, before.inputs, strict=True))
        return before.outputs[0] if same else None

    def _replaced(self, node: ir.Node) -> ir.Value | None:
        """What an operator on blocks computes: what its name says, and after that what was fused with it."""
        name = str(node.name)
        value = self._values.get(name.removesuffix(_NAMED)) if name.endswith(_NAMED) else None
        if value is None or not self._computes(node, value):
            return None
        has_sum = len(node.inputs) > 3 and node.inputs[3] is not None
        if has_sum:
            value = self._added(value, self._named(node.inputs[3]))
        activation = node.attributes.get_string("activation")
        if value is None or not activation:
            return value
        producer = value.producer()
        is_active = not has_sum and producer is not None and producer.op_type == activation
        return value if is_active else self._reader(value, (activation,))

    def _computes(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a value is what a node computes from what it reads, with nothing but constants folded into it."""
        read, kinds = self._named(node.inputs[0]), _REPLACED.get(node.op_type, (node.op_type,))
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
        """The sum of two values, if nothing else reads the first."""
        found = self._reader(value, ("Add", "Sum")) if other is not None else None
        producer = found.producer() if found is not None else None
        if producer is None or len(producer.inputs) != 2 or not any(x is other for x in producer.inputs):
            return None
        return found

    def _reader(self, value: ir.Value, kinds: Sequence[str]) -> ir.Value | None:
        """What is computed from a value by the only node that reads it, if that is of a kind."""
        uses = [use.node for use in value.uses()]
        if value.is_graph_output() or len(uses) != 1 or uses[0].graph is not self._graph:
            return None
        return uses[0].outputs[0] if uses[0].op_type in kinds else None


def _is_channels_last(node: ir.Node) -> bool:
    return bool(node.attributes.get_int("channels_last", 0))


def _fits(weight: ir.Value | None, value: ir.Value) -> bool:
    """Whether a convolution with this weight has as many channels as a value, but for those that fill a block."""
    channels = _channels(value)
    size = weight.shape[0] if weight is not None and weight.shape is not None else None
    return channels is not None and isinstance(size, int) and 0 <= size - channels < _PADDING


def _is_from(value: ir.Value | None, read: ir.Value) -> bool:
    """Whether one value is another, or made from it by what ONNX Runtime drops."""
    while value is not None and value is not read:
        producer = value.producer()
        value = producer.inputs[0] if producer is not None and producer.op_type in _BEFORE else None
    return value is read
