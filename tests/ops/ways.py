"""The ways of a sample: `torch.compile` on the CPU or on CUDA, `sardonyx.export`, `sardonyx.compile`, or the device
`ort`, strictly or with fallback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

import sardonyx

from .database import Arguments, over_tensors
from .edges import EDGES, UNFIT_ON_CUDA

COMPILED, EXPORTED, WRAPPED, CUDA = "", "export", "wrapper", "cuda"
STRICT, FALLBACK = "device, strict", "device, with fallback"
"""Their names. Strictly, everything on the device runs in ONNX Runtime: copies and casts too."""

INDICES_STAY = frozenset({"tensor_split"})
"""Operators whose further tensors torch wants on the CPU, whatever the device."""

Way: TypeAlias = Callable[[Any, Arguments], Callable[..., Any]]
"""From an operator and its arguments to a function of the tensors among those, which are the CPU's, as its results."""


def way_of(name: str, executor: str | None = None) -> Way:
    """A way by its name; those of the device enable it, with the executor that is asked for, if any is."""
    if name in CAPTURED:
        return lambda op, arguments: CAPTURED[name](over_tensors(op, arguments))
    from sardonyx import eager

    chosen = {} if executor is None else {"executor": executor}
    eager.enable(fallback="error" if name == STRICT else "quiet", **chosen)
    return on_device


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function through `torch.compile`, with no operator left to torch."""
    torch._dynamo.reset()
    return torch.compile(
        function, backend="sardonyx", fullgraph=True, dynamic=False, options={"fallback": "error", **options}
    )


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def exported(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a file, which is exported at the first call."""
    module = _Module(function).eval()
    return lambda *tensors: sardonyx.export(module, tensors)(*tensors)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a module in the wrapper, which may leave operators to torch."""
    return sardonyx.compile(_Module(function).eval(), fallback="quiet")


CAPTURED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    COMPILED: compiled,
    EXPORTED: exported,
    WRAPPED: wrapped,
    CUDA: compiled,
}
"""The ways that make a graph of a whole function: several samples go into one, since most of the time is capture."""


def on_device(op: Any, arguments: Arguments) -> Callable[..., Any]:
    """The operator on tensors that are moved to the device; its results must be there, and are moved back.

    Where nothing says on which device a new tensor is to be, it is to be on this one. Every call is made twice, since a
    call that was made before goes another way; both must give the same.
    """
    function = over_tensors(op, tree_map(_there, arguments))
    moved = 1 if op.name in INDICES_STAY else len(tree_leaves(arguments))

    def run(*tensors: torch.Tensor) -> Any:
        seeded = torch.get_rng_state()
        first = once(*tensors)
        torch.set_rng_state(seeded)
        again = once(*tensors)
        if not op.name.startswith(("empty", "new_empty")):
            torch.testing.assert_close(again, first, equal_nan=True, msg=lambda text: f"called again: {text}")
        return again

    def once(*tensors: torch.Tensor) -> Any:
        with torch.device("ort"):
            results = function(*(x.to("ort") for x in tensors[:moved]), *tensors[moved:])
        elsewhere = {x.device.type for x in tree_leaves(results) if isinstance(x, torch.Tensor)} - {"ort"}
        if elsewhere:
            raise RuntimeError(f"a result is on {', '.join(elsewhere)}")
        return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, results)

    return run


def _there(leaf: Any, device: str = "ort") -> Any:
    """An argument that names a device names ours."""
    return torch.device(device) if isinstance(leaf, (str, torch.device)) and str(leaf) == "cpu" else leaf


def is_fit_for_cuda(op: Any, sample: Any) -> bool:
    """Whether torch itself gives one result for a sample on CUDA, of the dtype that it promises backends."""
    if op.name in UNFIT_ON_CUDA and sample.name == EDGES:
        return False
    if op.name == "unique_consecutive" and torch.__version__ < "2.13" and sample.kwargs.get("return_counts"):
        return False  # its counts are integers, but torch tells backends that they have the dtype of the elements
    return not _repeats_indices(op, sample)


def _repeats_indices(op: Any, sample: Any) -> bool:
    """Whether some positions are written twice, of which any may be the last on CUDA."""
    if not op.name.startswith("nn.functional.max_unpool"):
        return False
    planes = sample.args[0].flatten(-int(op.name[-2]))
    return any(row.unique().numel() < row.numel() for row in planes.reshape(-1, planes.shape[-1]))


def on_cuda(op: Any, sample: Any) -> Any:
    """The sample with its tensors on CUDA; of convolutions in half precision with finite ones.

    cuDNN's kernels of those lose infinities and NaN, in torch too.
    """
    moved = copy.copy(sample)
    loses = op.name.startswith("nn.functional.conv")

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return _there(leaf, "cuda")
        is_half = leaf.is_floating_point() and leaf.itemsize == 2
        return (leaf.nan_to_num(1, 2, -2) if loses and is_half else leaf).cuda()

    moved.input = tree_map(there, sample.input)
    if op.name not in INDICES_STAY:
        moved.args, moved.kwargs = tree_map(there, sample.args), tree_map(there, sample.kwargs)
    return moved
