"""From a model to the same with kernels of its own: groups of nodes become custom operators of one library."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx.native.cpp import Kernel
from sardonyx.native.lower import lower
from sardonyx.native.region import CannotLower, Lowering, is_fixed
from sardonyx.native.select import (
    PRODUCTS,
    TURNED,
    Choice,
    Selection,
    cannot_be,
    expected,
    is_by_name,
    select,
    turns,
)
from sardonyx.native.targets import TARGETS, Target
from sardonyx.toolchain.headers import read_header

log = logging.getLogger(__name__)

DOMAIN = "sardonyx.native"
"""What the domains of all kernels begin with."""


class Library:
    """Kernels as operators of one domain, equal ones once. Several models may share it."""

    def __init__(self, target: Target = TARGETS["cpu"]) -> None:
        self.target = target
        self._names: dict[str, str] = {}
        self._kernels: list[Kernel] = []

    def add(self, kernel: Kernel) -> str:
        """The name under which the library has a kernel from now on."""
        code = kernel.code("NAME")
        if code not in self._names:
            self._names[code] = f"Kernel{len(self._names)}"
            self._kernels.append(kernel)
        return self._names[code]

    @property
    def domain(self) -> str:
        """The domain of the operators: no other library has it."""
        return f"{DOMAIN}." + hashlib.sha256("".join(self._names).encode()).hexdigest()[:12]

    @property
    def source(self) -> str:
        """Its C++."""
        return library_source(self._kernels, self.domain, self.target)


@dataclass(frozen=True)
class Part:
    """A group of nodes, and the kernel that does the same."""

    group: Sequence[ir.Node]
    kernel: Kernel
    name: str

    @property
    def node_name(self) -> str:
        """The name of the node that calls the kernel."""
        return f"{self.name}_{self.group[-1].name}"

    @property
    def reads(self) -> list[ir.Value]:
        """What the nodes read that changes from call to call."""
        own = {output for node in self.group for output in node.outputs}
        read = dict.fromkeys(x for node in self.group for x in node.inputs if x is not None and x not in own)
        return [x for x in read if not is_fixed(x)]

    @property
    def gives(self) -> list[ir.Value]:
        """What others want of its results."""
        return list(self.kernel.region.outputs)


@dataclass(frozen=True)
class Plan:
    """Which parts of a model become kernels."""

    model: ir.Model
    parts: Sequence[Part]
    library: Library
    refused: dict[ir.Node, str]
    """Why other nodes that were wanted stay as they are."""

    @property
    def source(self) -> str:
        """C++ of the library that has the kernels."""
        return self.library.source

    @property
    def groups(self) -> list[list[str]]:
        """For each kernel in the model, the operators it stands for."""
        return [[node.op_type for node in part.group] for part in self.parts]

    def only(self, kept: Collection[int]) -> Plan:
        """The same with some of its parts, by their places, and a library for these."""
        library = Library(self.library.target)
        parts = [
            Part(part.group, part.kernel, library.add(part.kernel)) for i, part in enumerate(self.parts) if i in kept
        ]
        return Plan(self.model, parts, library, self.refused)

    def splice(self) -> None:
        """Put the kernels into the model, in the place of what they compute."""
        graph, domain = self.model.graph, self.library.domain
        now: dict[ir.Value, ir.Value] = {}
        for part in self.parts:
            _replace(part, domain, now)
        graph.opset_imports[domain] = 1
        graph.sort()


def plan(
    model: ir.Model,
    *,
    choice: Choice = "auto",
    least: int = 0,
    library: Library | None = None,
    branches: bool = False,
) -> Plan:
    """What of a model is to be kernels of its own, each of which has to write at least so many elements.

    In the branches of `If` too, where that is asked for and the choice is not by name. What the kernels are for is what
    the library is for.
    """
    library = Library() if library is None else library
    refused: dict[ir.Node, str] = {}
    parts = []
    for graph in [model.graph, *(_branches(model.graph) if branches and not is_by_name(choice) else [])]:
        selection = _selected(graph, choice, library.target)
        refused |= selection.refused
        for wanted in selection.groups:
            for group, kernel in _kernels(wanted, refused, choice, library.target):
                if kernel.writes() >= least:
                    parts.append(Part(group, kernel, library.add(kernel)))
    for node, why in refused.items():
        log.debug("%s %s stays: %s", node.op_type, node.name, why)
    return Plan(model, parts, library, refused)


def _selected(graph: ir.Graph, choice: Choice, target: Target) -> Selection:
    """The groups of a graph; with "auto" without transposes that make a kernel go through memory in steps."""
    apart = {} if target.kernel.MULTIPLIES else {node: _LEFT for node in graph if node.op_type in PRODUCTS}
    while True:
        selection = select(graph, choice, apart)
        groups = [group for group in selection.groups if choice == "auto" and any(map(turns, group))]
        kernels = [made for group in groups for made in _kernels(group, {}, choice, target)]
        found = [node for group, kernel in kernels if kernel.strides for node in group if turns(node)]
        if not found:
            return selection
        apart |= dict.fromkeys(found, TURNED)


_LEFT = "products of matrices are left to onnxruntime on a GPU"


def _branches(graph: ir.Graph) -> list[ir.Graph]:
    """The graphs that an `If` of a graph chooses from, and those in these."""
    chosen = [attribute.as_graph() for node in graph if node.op_type == "If" for attribute in node.attributes.values()]
    return [found for branch in chosen for found in (branch, *_branches(branch))]


def _kernels(
    group: Sequence[ir.Node], refused: dict[ir.Node, str], choice: Choice, target: Target
) -> list[tuple[Sequence[ir.Node], Kernel]]:
    """The kernel of a group; where it is too large for one, or cannot be one, those of its halves, before and after."""
    if choice == "auto" and not expected(group).seconds:
        return []
    if len(group) > _MOST_NODES and not is_by_name(choice):
        return _halves(group, refused, choice, target)
    try:
        kernel = _kernel(group, target)
        kernel.code("NAME")
        return [(group, kernel)]
    except CannotLower as error:
        if is_by_name(choice):
            raise cannot_be(group[-1], f"not in one with {group[0].name!r}: {error}") from None
        if len(group) == 1:
            refused[group[0]] = str(error)
            return []
        return _halves(group, refused, choice, target)


def _halves(
    group: Sequence[ir.Node], refused: dict[ir.Node, str], choice: Choice, target: Target
) -> list[tuple[Sequence[ir.Node], Kernel]]:
    half = len(group) // 2
    return [found for part in (group[:half], group[half:]) for found in _kernels(part, refused, choice, target)]


_MOST_NODES = 128
"""In one kernel: a C++ compiler takes more than twice as long for a function of twice the length."""


def _kernel(group: Sequence[ir.Node], target: Target) -> Kernel:
    members = set(group)
    outputs = [output for node in group for output in node.outputs]
    region = Lowering({x for x in outputs if x.is_graph_output() or any(u.node not in members for u in x.uses())})
    for node in group:
        lower(region, node)
    return target.kernel(region)


def _replace(part: Part, domain: str, now: dict[ir.Value, ir.Value]) -> None:
    """Put one node in the place of a group; `now` tells which values others have already become."""
    group, kernel, graph = part.group, part.kernel, part.group[-1].graph
    assert isinstance(graph, ir.Graph)
    outputs = list(kernel.region.outputs)
    inputs = [now.get(x, x) for x in kernel.region.inputs]
    node = ir.Node(domain, part.name, inputs, num_outputs=len(outputs))
    node.name = part.node_name
    for old, new in zip(outputs, node.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        new.meta.update(old.meta)
        old.name = f"{old.name}_replaced"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        now[old] = new
    graph.insert_after(group[-1], node)
    graph.remove(group, safe=True)


_OPERATOR = """
static const int {name}_inputs[] = {{{inputs}}}, {name}_outputs[] = {{{outputs}}};
struct {name}_Operator : ort::CustomOp {{
  {name}_Operator() {{
    name = [](const CustomOp*) {{ return "{name}"; }};
    provider = [](const CustomOp*) {{ return "{provider}"; }};
    input_count = [](const CustomOp*) -> size_t {{ return {input_count}; }};
    output_count = [](const CustomOp*) -> size_t {{ return {output_count}; }};
    input_type = [](const CustomOp*, size_t i) {{ return {name}_inputs[i]; }};
    output_type = [](const CustomOp*, size_t i) {{ return {name}_outputs[i]; }};
    input_characteristic = output_characteristic = [](const CustomOp*, size_t) {{ return 0; }};
    input_memory = [](const CustomOp*, size_t) {{ return 0; }};
    variadic_input_least = variadic_output_least = [](const CustomOp*) {{ return 1; }};
    variadic_input_homogeneous = variadic_output_homogeneous = [](const CustomOp*) {{ return 1; }};
    create_kernel_v2 = [](const CustomOp*, const void* const*, const ort::Info* info, void** kernel) -> ort::Status* {{
      try {{
        auto held = std::make_unique<{name}::Held>();
        if (auto s = {name}::hold(info, *held)) return s;
        *kernel = held.release();
        return nullptr;
      }} catch (const std::bad_alloc&) {{
        return ort::failure("no memory is left for the weights of a kernel");
      }}
    }};
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {{
      try {{
        return {name}::run(context, *static_cast<const {name}::Held*>(kernel));
      }} catch (const std::bad_alloc&) {{
        return ort::failure("no memory is left for a kernel");
      }}
    }};
    destroy = [](void* kernel) {{ delete static_cast<{name}::Held*>(kernel); }};
  }}
}} static {name}_operator;
"""

_REGISTER = """
extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {{
  if (!base->get_api(ort::kVersion)) {{
    ort::g_api = base->get_api(1);
    return ort::failure("native kernels need onnxruntime 1.18 or later");
  }}
  ort::g_api = base->get_api(ort::kVersion);
  static std::mutex making;
  static ort::Domain* domain = nullptr;
  const std::lock_guard<std::mutex> alone(making);
  if (!domain) {{
    const ort::CustomOp* operators[] = {{{operators}}};
    if (auto s = ort::make_domain("{domain}", operators, std::size(operators), &domain)) return s;
  }}
  return ort::add_domain(options, domain);
}}
"""


def library_source(kernels: Sequence[Kernel], domain: str, target: Target) -> str:
    """C++ of a library with these kernels as operators of a domain."""
    parts = [read_header(package, name) for package, name in target.headers]
    names = [f"Kernel{i}" for i in range(len(kernels))]
    parts.append("namespace {")
    for name, kernel in zip(names, kernels, strict=True):
        parts.append(kernel.code(name))
        types = [", ".join(str(int(b.dtype)) for b in side) or "0" for side in (kernel.inputs, kernel.outputs)]
        parts.append(
            _OPERATOR.format(
                name=name,
                provider=target.provider,
                inputs=types[0],
                outputs=types[1],
                input_count=len(kernel.inputs),
                output_count=len(kernel.outputs),
            )
        )
    parts.append("}  // namespace")
    operators = ", ".join(f"&{name}_operator" for name in names)
    parts.append(_REGISTER.format(domain=domain, operators=operators))
    return "\n".join(parts)
