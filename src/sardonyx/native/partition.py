"""Partition a model: groups of nodes become custom operators of one library of kernels."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx.native.cpp import Kernel
from sardonyx.native.lower import lower
from sardonyx.native.region import CannotLower, Lowering, is_constant
from sardonyx.native.select import (
    MOVES_LAST_AXIS,
    PRODUCTS,
    Choice,
    Selection,
    expected_savings,
    is_by_name,
    is_narrow,
    may_divide_by_zero,
    moves_last_axis,
    not_lowerable_error,
    reduces_to_few,
    select,
)
from sardonyx.native.targets import TARGETS, Target, guarded
from sardonyx.toolchain.headers import read_header

log = logging.getLogger(__name__)

DOMAIN = "sardonyx.native"
"""Prefix of the domains of all kernels."""


class Library:
    """Kernels as operators of one domain, without duplicates. Several models may share it."""

    def __init__(self, target: Target = TARGETS["cpu"]) -> None:
        self.target = target
        self._names: dict[str, str] = {}
        self._kernels: list[Kernel] = []

    def add(self, kernel: Kernel) -> str:
        """Add a kernel and return its name."""
        code = kernel.code("NAME")
        if code not in self._names:
            self._names[code] = f"Kernel{len(self._names)}"
            self._kernels.append(kernel)
        return self._names[code]

    @property
    def domain(self) -> str:
        """The domain of the operators, unique to this library."""
        return f"{DOMAIN}." + hashlib.sha256("".join(self._names).encode()).hexdigest()[:12]

    @property
    def source(self) -> str:
        """Its C++ source."""
        return library_source(self._kernels, self.domain, self.target)


@dataclass(frozen=True)
class KernelGroup:
    """A group of nodes, and the kernel that replaces it."""

    group: Sequence[ir.Node]
    kernel: Kernel
    name: str

    @property
    def node_name(self) -> str:
        """The name of the node that calls the kernel."""
        return f"{self.name}_{self.group[-1].name}"

    @property
    def inputs(self) -> list[ir.Value]:
        """The non-constant values that the nodes read."""
        own = {output for node in self.group for output in node.outputs}
        read = dict.fromkeys(x for node in self.group for x in node.inputs if x is not None and x not in own)
        return [x for x in read if not is_constant(x)]

    @property
    def outputs(self) -> list[ir.Value]:
        """The results used outside of the group."""
        return list(self.kernel.region.outputs)


@dataclass(frozen=True)
class KernelPlan:
    """The groups of a model that become kernels."""

    model: ir.Model
    parts: Sequence[KernelGroup]
    library: Library
    rejected: dict[ir.Node, str]
    """Why other selected nodes are not in kernels."""

    @property
    def source(self) -> str:
        """C++ source of the library."""
        return self.library.source

    @property
    def groups(self) -> list[list[str]]:
        """Operators of each kernel."""
        return [[node.op_type for node in part.group] for part in self.parts]

    def subset(self, indices: Collection[int]) -> KernelPlan:
        """Return a plan with some of its parts, by index, and a library for these."""
        library = Library(self.library.target)
        parts = [
            KernelGroup(part.group, part.kernel, library.add(part.kernel))
            for i, part in enumerate(self.parts)
            if i in indices
        ]
        return KernelPlan(self.model, parts, library, self.rejected)

    def splice(self) -> None:
        """Replace the groups in the model by nodes that call the kernels."""
        graph, domain = self.model.graph, self.library.domain
        replaced: dict[ir.Value, ir.Value] = {}
        for part in self.parts:
            _replace(part, domain, replaced)
        graph.opset_imports[domain] = 1
        graph.sort()


def plan_kernels(
    model: ir.Model,
    *,
    choice: Choice = "auto",
    min_elements: int = 0,
    library: Library | None = None,
    branches: bool = False,
) -> KernelPlan:
    """Plan the kernels of a model, each of which must write at least `min_elements` elements.

    With `branches`, also in the branches of `If`, unless the choice is by name. The target is that of the library.
    """
    library = Library() if library is None else library
    rejected: dict[ir.Node, str] = {}
    parts = []
    for graph in [model.graph, *(_branches(model.graph) if branches and not is_by_name(choice) else [])]:
        selection = _select_groups(graph, choice, library.target)
        rejected |= selection.rejected
        for candidates in selection.groups:
            for group, kernel in _group_kernels(candidates, rejected, choice, library.target):
                if kernel.writes() >= min_elements:
                    parts.append(KernelGroup(group, kernel, library.add(kernel)))
    for node, reason in rejected.items():
        log.debug("%s %s is not in a kernel: %s", node.op_type, node.name, reason)
    return KernelPlan(model, parts, library, rejected)


def _select_groups(graph: ir.Graph, choice: Choice, target: Target) -> Selection:
    """Return the groups of a graph; with "auto" without transposes that make a kernel access memory with strides."""
    excluded = _excluded(graph, choice, target)
    while True:
        selection = select(graph, choice, excluded, target.slow_seconds)
        groups = [group for group in selection.groups if choice == "auto" and any(map(moves_last_axis, group))]
        kernels = [kernel for group in groups for kernel in _group_kernels(group, {}, choice, target)]
        strided = [
            node
            for group, kernel in kernels
            if kernel.is_strided
            for node in group
            if moves_last_axis(node) and not (target.kernel.READS_ACROSS and is_narrow(node))
        ]
        if not strided:
            return selection
        excluded |= dict.fromkeys(strided, MOVES_LAST_AXIS)


def _excluded(graph: ir.Graph, choice: Choice, target: Target) -> dict[ir.Node, str]:
    """Return the nodes that no kernel of a target computes, and with "auto" those that ONNX Runtime computes better."""
    excluded: dict[ir.Node, str] = {}
    if target.kernel.RAISES_BY_ZERO:
        excluded |= {node: _BY_ZERO for node in graph if may_divide_by_zero(node)}
    if target.kernel.HAS_PRODUCTS:
        return excluded
    excluded |= {node: _NO_GPU_PRODUCTS for node in graph if node.op_type in PRODUCTS}
    if choice == "auto":
        excluded |= {node: _FUSED for node in graph if target.is_left(node)}
        excluded |= {node: _FEW_RESULTS for node in graph if reduces_to_few(node)}
    return excluded


_BY_ZERO = "a division of integers by what may be zero, which onnxruntime reports as an error"
_NO_GPU_PRODUCTS = "matrix products run in onnxruntime on a GPU"
_FUSED = "one kernel of onnxruntime"
_FEW_RESULTS = "a long reduction to few numbers"


def _branches(graph: ir.Graph) -> list[ir.Graph]:
    branches = [
        attribute.as_graph() for node in graph if node.op_type == "If" for attribute in node.attributes.values()
    ]
    return [subgraph for branch in branches for subgraph in (branch, *_branches(branch))]


def _group_kernels(
    group: Sequence[ir.Node], rejected: dict[ir.Node, str], choice: Choice, target: Target
) -> list[tuple[Sequence[ir.Node], Kernel]]:
    """Return the kernel of a group, or those of its halves if it is too large or cannot be lowered."""
    if choice == "auto" and not expected_savings(group, target.slow_seconds).seconds:
        return []
    if len(group) > _MAX_NODES and not is_by_name(choice):
        return _split_group(group, rejected, choice, target)
    try:
        kernel = _lower_group(group, target)
        kernel.code("NAME")
        return [(group, kernel)]
    except CannotLower as error:
        if is_by_name(choice):
            raise not_lowerable_error(group[-1], f"not in one with {group[0].name!r}: {error}") from None
        if len(group) == 1:
            rejected[group[0]] = str(error)
            return []
        return _split_group(group, rejected, choice, target)


def _split_group(
    group: Sequence[ir.Node], rejected: dict[ir.Node, str], choice: Choice, target: Target
) -> list[tuple[Sequence[ir.Node], Kernel]]:
    half = len(group) // 2
    return [
        kernel for part in (group[:half], group[half:]) for kernel in _group_kernels(part, rejected, choice, target)
    ]


_MAX_NODES = 128
"""Nodes in one kernel: compile time more than doubles with twice the length of a function."""


def _lower_group(group: Sequence[ir.Node], target: Target) -> Kernel:
    members = set(group)
    outputs = [output for node in group for output in node.outputs]
    returned = {x for x in outputs if x.is_graph_output() or any(u.node not in members for u in x.uses())}
    region = Lowering(returned, hoists=target.kernel.HOISTS)
    for node in group:
        lower(region, node)
    return target.kernel(region)


def _replace(part: KernelGroup, domain: str, replaced: dict[ir.Value, ir.Value]) -> None:
    """Replace a group by one node; `replaced` maps values that earlier groups replaced."""
    group, kernel, graph = part.group, part.kernel, part.group[-1].graph
    assert isinstance(graph, ir.Graph)
    outputs = list(kernel.region.outputs)
    inputs = [replaced.get(x, x) for x in kernel.region.inputs]
    node = ir.Node(domain, part.name, inputs, num_outputs=len(outputs))
    node.name = part.node_name
    for old, new in zip(outputs, node.outputs, strict=True):
        new.name, new.type, new.shape = old.name, old.type, old.shape
        new.meta.update(old.meta)
        old.name = f"{old.name}_replaced"
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        replaced[old] = new
    graph.insert_after(group[-1], node)
    graph.remove(group, safe=True)


_OPERATOR = """
namespace {{
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
        return ort::failure("out of memory for the weights of a kernel");
      }}
    }};
    compute_v2 = [](void* kernel, ort::Context* context) -> ort::Status* {{
      try {{
        return {name}::run(context, *static_cast<const {name}::Held*>(kernel));
      }} catch (const std::bad_alloc&) {{
        return ort::failure("out of memory in a kernel");
      }}
    }};
    destroy = [](void* kernel) {{ delete static_cast<{name}::Held*>(kernel); }};
  }}
}} static {name}_operator;
}}  // namespace
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


def registration(domain: str, operators: Sequence[str]) -> str:
    """Return the C++ function that registers operators, variables of these names, with a session's options."""
    return _REGISTER.format(domain=domain, operators=", ".join(f"&{name}" for name in operators))


def library_source(kernels: Sequence[Kernel], domain: str, target: Target) -> str:
    """Return the C++ source of a library with these kernels as operators of a domain."""
    parts = [guarded(condition, read_header(package, name)) for condition, package, name in target.headers]
    names = [f"Kernel{i}" for i in range(len(kernels))]
    for name, kernel in zip(names, kernels, strict=True):
        parts.append(kernel.code(name))
        types = [", ".join(str(int(b.dtype)) for b in side) or "0" for side in (kernel.inputs, kernel.outputs)]
        operator = _OPERATOR.format(
            name=name,
            provider=target.provider,
            inputs=types[0],
            outputs=types[1],
            input_count=len(kernel.inputs),
            output_count=len(kernel.outputs),
        )
        parts.append(guarded(target.host_code, operator))
    registered = registration(domain, [f"{name}_operator" for name in names])
    parts.append(guarded(target.host_code, registered))
    return "\n".join(parts)
