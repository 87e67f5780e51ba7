"""One training step through sardonyx beside the same step in double precision: how far apart they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sardonyx.telemetry.report import Report, collecting
from sardonyx.telemetry.verify import difference

from .modules import Case

SEED = 0
NOTHING = 1e-10
"""In double precision a gradient below this is one that cancels out, as a bias's before batch norm does."""

Values = dict[str, torch.Tensor]


class Mismatch(AssertionError):
    """A step that is not torch's."""


def check(case: Case, *, dynamic: bool) -> float:
    """The largest relative error of a step; raises `Mismatch` where it is too large, or what the compiler raises."""
    with torch._dynamo.config.patch(allow_rnn=case.family == "recurrent"):  # by default dynamo leaves those to torch
        return _check(case, dynamic)


def _check(case: Case, dynamic: bool) -> float:
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    model = case.build()
    if case.random:
        return _judge_random(case, model, dynamic)
    exact = copy.deepcopy(model).double()
    run = compiled(model, dynamic)
    worst = 0.0
    for turn, size in enumerate(case.batches if dynamic else case.batches[:1]):
        torch.manual_seed(SEED + 1 + turn)
        given = case.inputs(size)
        with collecting() as report:
            ours = step(run, model, given, case.learns)
        if not turn and went_through_onnx(report) == bool(case.in_torch):
            raise Mismatch("nothing of it went through ONNX" if not case.in_torch else "it does go through ONNX")
        if turn and report.graphs and not _recompiles(case):
            raise Mismatch("a second batch size compiles again, which torch by itself does not need")
        worst = max(worst, _compared(ours, step(exact, exact, widened(given), case.learns), case.tolerance))
    return worst


def compiled(model: nn.Module, dynamic: bool) -> Callable[..., Any]:
    """The module through ONNX alone: an operator that would stay in torch is an error."""
    return torch.compile(model, backend="sardonyx", dynamic=dynamic, options={"fallback": "error"})


def went_through_onnx(report: Report) -> bool:
    """Whether anything was compiled."""
    return any(graph.regions for graph in report.graphs)


def widened(tree: Any) -> Any:
    """The same in double precision."""
    return tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree)


@torch.enable_grad()
def step(run: Callable[..., Any], model: nn.Module, given: Any, learns: int | None) -> Values:
    """Forward and backward: results, gradients of parameters and arguments, buffers after it."""
    model.zero_grad()
    count = len(given) if learns is None else learns
    keywords = given if isinstance(given, dict) else {}
    args = [] if keywords else [_leaves(arg, index < count) for index, arg in enumerate(given)]
    results = [x for x in tree_leaves(run(*args, **keywords)) if isinstance(x, torch.Tensor)]
    learned = [x for x in results if x.requires_grad]
    torch.autograd.backward(learned, [_tangent(x) for x in learned])
    return dict(_values(results, model, args))


def _leaves(arg: Any, learns: bool) -> Any:
    def leaf(x: Any) -> Any:
        fits = learns and isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().clone().requires_grad_() if fits else x

    return tree_map(leaf, arg)


def _tangent(x: torch.Tensor) -> torch.Tensor:
    """A weight for each element of a result, all different, and the same in every precision."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(SEED)).to(x.dtype)


def _values(results: list[torch.Tensor], model: nn.Module, args: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((f"result {i}", x.detach()) for i, x in enumerate(results))
    yield from ((f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None)
    leaves = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    yield from ((f"gradient of argument {i}", x.grad) for i, x in enumerate(leaves) if x.grad is not None)
    yield from ((f"buffer {name}", x.detach().clone()) for name, x in model.named_buffers())


def _compared(ours: Values, exact: Values, tolerance: float) -> float:
    if ours.keys() != exact.keys():
        raise Mismatch(f"there are {sorted(ours.keys() ^ exact.keys())} on one side only")
    errors = {name: _error(name, ours[name], exact) for name in exact}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= tolerance:
        raise Mismatch(f"{worst} is off by {errors[worst]:.1e}")
    return errors[worst]


def _error(name: str, ours: torch.Tensor, exact: Values) -> float:
    """Relative to the largest element; for a gradient that cancels out, to the largest of any gradient."""
    expected = exact[name]
    ours = ours.to(expected.dtype) if expected.is_floating_point() else ours
    cancels = name.startswith("gradient") and expected.numel() and 0 < expected.abs().max() < NOTHING
    if not cancels or ours.shape != expected.shape:
        return difference(ours, expected)
    scale = max(g.abs().max().item() for other, g in exact.items() if other.startswith("gradient") and g.numel())
    return (ours - expected).abs().max().item() / scale


def _recompiles(case: Case) -> bool:
    """Whether torch compiles a second time for the second batch size, whatever the backend does."""
    torch._dynamo.reset()
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda fx, _: fx.forward)(graph, inputs)

    torch.manual_seed(SEED)
    model = case.build()
    run = torch.compile(model, backend=counting, dynamic=True)
    counts = []
    for size in case.batches:
        step(run, model, case.inputs(size), case.learns)
        counts.append(len(graphs))
    return counts[1] > counts[0]


# Random numbers


def _judge_random(case: Case, model: nn.Module, dynamic: bool) -> float:
    """The same seed gives the same step, another seed another one, and the backward knows what the forward drew."""
    if case.random == "slope":
        model = model.double()
    run = compiled(model, dynamic)
    worst = 0.0
    for turn, size in enumerate(case.batches if dynamic else case.batches[:1]):
        given = widened(case.inputs(size)) if case.random == "slope" else case.inputs(size)
        with collecting() as report:
            first, again, other = [_seeded(run, model, given, seed) for seed in (1, 1, 2)]
        if not turn and not went_through_onnx(report):
            raise Mismatch("nothing of it went through ONNX")
        if any(not torch.equal(first[name], again[name]) for name in first):
            raise Mismatch("the same seed gives another step")
        if all(torch.equal(first[name], other[name]) for name in first):
            raise Mismatch("another seed gives the same step")
        error = _factor_error(first, given) if case.random == "factor" else _slope_error(run, model, given, first)
        worst = max(worst, error)
    if not worst <= case.tolerance:
        raise Mismatch(f"the backward is off by {worst:.1e} from what the forward drew")
    return worst


def _seeded(run: Callable[..., Any], model: nn.Module, given: Any, seed: int) -> Values:
    torch.manual_seed(seed)
    return step(run, model, given, None)


def _factor_error(values: Values, given: Any) -> float:
    """What multiplies each element multiplies its gradient, too: y = m · x means that the gradient is m · tangent."""
    (x,) = given
    y, gradient = values["result 0"], values["gradient of argument 0"]
    return difference(gradient * x, y * _tangent(y))


def _slope_error(run: Callable[..., Any], model: nn.Module, given: Any, values: Values) -> float:
    """The step's slope along a direction, from two runs with the same noise beside each other, and by the gradient."""
    (x,) = given
    generator = torch.Generator().manual_seed(SEED)
    way = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    ahead, behind = (_seeded(run, model, (x + h * way,), 1) for h in (1e-4, -1e-4))
    rise = sum(
        ((ahead[name] - behind[name]) * _tangent(y)).sum().item()
        for name, y in values.items()
        if name.startswith("result")
    )
    slope = (values["gradient of argument 0"] * way).sum().item()
    return abs(rise / 2e-4 - slope) / abs(slope)
