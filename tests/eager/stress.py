"""Random programs of operators on the device, beside the same on the CPU: `python -m tests.eager.stress --minutes 20`.

A program is a list of steps over a few tensors, each of which is on both devices. A step views, writes in place,
computes, differentiates, copies or saves; tensors are forgotten in any order. Hypothesis draws them, in batches that
a number names, and makes one that fails as small as it can; the batches that run are written to a file before they do,
so that one that kills the process is known, and `--batches` takes them again, telling each step before it is taken.

With the address sanitizer, libstdc++ has to be there first too, or the first exception ends the process:
ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libstdc++.so)"
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import io
import logging
import pickle
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sardonyx import eager

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3, torch.float64: 1e-6}
"""Of a step that computes; what it gives is then made the same on both devices, so that nothing adds up."""
SIZES = (0, 1, 1, 2, 3, 3, 4, 5)
_MOST_ELEMENTS = 600
_MOST_TENSORS = 12
_A_BATCH = 20


@dataclass
class Pair:
    """A tensor on the device, and the same on the CPU."""

    ours: Tensor
    theirs: Tensor


Step = Callable[[random.Random, Sequence[Tensor]], Callable[[Sequence[Tensor]], Any]]
"""Draws what is to be done to tensors that look like these, as a function of tensors on either device."""

STEPS: dict[str, Step] = {}
"""By name; those that begin with "view" share memory with an operand, those with "write" change the first one."""


def step(draw: Step) -> Step:
    """Let it be drawn."""
    STEPS[draw.__name__] = draw
    return draw


def table(kind: str, functions: dict[str, Callable[..., Any]], operands: int = 1) -> None:
    """Steps that have nothing to draw."""
    for name, function in functions.items():
        STEPS[f"{kind}_{name}"] = _plain(function, operands)


def _plain(function: Callable[..., Any], operands: int) -> Step:
    return lambda rng, like: lambda tensors: function(*(tensors * operands)[:operands])


def _dim(rng: random.Random, x: Tensor) -> int:
    return rng.randrange(-x.dim(), x.dim()) if x.dim() else 0


def _number(rng: random.Random, x: Tensor) -> Any:
    if x.dtype == torch.bool:
        return rng.random() < 0.5
    return rng.choice([0, 1, 2, 3, rng.randint(0, 9)] if not x.is_floating_point() else [0.0, 1.0, 0.5, -2.0, 3])


# Views


table(
    "view",
    {
        "t": lambda x: x.mT if x.dim() > 1 else x.t() if x.dim() == 1 else x,
        "flat": lambda x: x.view(-1) if x.is_contiguous() else x[...],
        "reshape": lambda x: x.reshape(*reversed(x.shape)),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "squeeze": lambda x: x.squeeze(),
        "detach": lambda x: x.detach(),
        "diagonal": lambda x: x.diagonal(0, 0, 1) if x.dim() > 1 else x[...],
        "expand": lambda x: x.expand(2, *x.shape),
        "bytes": lambda x: x.view(torch.uint8) if x.dim() and x.is_contiguous() and x.dtype != torch.bool else x[...],
    },
)


@step
def view_slice(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    taken = [slice(rng.randint(0, n), None, rng.randint(1, 2)) for n in like[0].shape]
    return lambda tensors: tensors[0][tuple(taken)]


@step
def view_select(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    places = [(d, n) for d, n in enumerate(like[0].shape) if n]
    if not places:
        return lambda tensors: tensors[0].unsqueeze(-1)
    dim, size = rng.choice(places)
    index = rng.randrange(-size, size)
    return lambda tensors: tensors[0].select(dim, index)


@step
def view_transpose(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    order = rng.sample(range(like[0].dim()), like[0].dim())
    return lambda tensors: tensors[0].permute(order)


@step
def view_as_strided(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    count = like[0].untyped_storage().nbytes() // like[0].element_size()
    if not count:
        return lambda tensors: tensors[0][...]
    offset = rng.randrange(count)
    rows = rng.randint(1, min(count - offset, 4))
    return lambda tensors: tensors[0].as_strided((rows, 1), (1, 1), offset)


@step
def view_unfold(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    dim = _dim(rng, like[0])
    size = like[0].shape[dim] if like[0].dim() else 1
    width, apart = rng.randint(0, min(size, 3)), rng.randint(1, 3)
    return lambda tensors: tensors[0].unfold(dim, width, apart)


@step
def view_split(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    dim = _dim(rng, like[0])
    return lambda tensors: tensors[0].chunk(2, dim) if tensors[0].dim() else tensors[0][...]


# Writes


def _writable(x: Tensor) -> bool:
    """Whether no two of its elements are one in memory."""
    return not any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


@step
def write_number(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    value = _number(rng, like[0])
    names = ["fill_", "logical_and_"] if like[0].dtype == torch.bool else ["fill_", "add_", "mul_", "clamp_"]
    name = rng.choice(names)
    if name == "logical_and_":
        return lambda tensors: tensors[0].logical_and_(tensors[0])
    return lambda tensors: getattr(tensors[0], name)(value)


@step
def write_copy(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    return lambda tensors: tensors[0].copy_(tensors[-1].sum().to(tensors[0].dtype))


@step
def write_slice(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    value, taken = _number(rng, like[0]), tuple(slice(rng.randint(0, n), None) for n in like[0].shape)

    def write(tensors: Sequence[Tensor]) -> Tensor:
        tensors[0][taken] = value
        return tensors[0]

    return write


@step
def write_mask(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    value = _number(rng, like[0])

    def write(tensors: Sequence[Tensor]) -> Tensor:
        tensors[0][tensors[0] == value] = value
        return tensors[0]

    return write


@step
def write_index(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    value, size = _number(rng, like[0]), like[0].shape[0] if like[0].dim() else 0
    places = [rng.randrange(size) for _ in range(2)] if size else []

    def write(tensors: Sequence[Tensor]) -> Tensor:
        if places:
            tensors[0][torch.tensor(places, device=tensors[0].device)] = value
        return tensors[0]

    return write


@step
def write_set_data(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    """Another memory under the same tensor, which others that shared the old one keep."""

    def write(tensors: Sequence[Tensor]) -> Tensor:
        fresh = tensors[-1].detach().clone()
        return tensors[0].set_(fresh) if fresh.dtype == tensors[0].dtype else tensors[0]

    return write


@step
def write_out(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    """Into a tensor of its own, which has the right shape, or no elements, or lies the other way around."""
    how = rng.choice(["right", "empty", "turned"])

    def write(tensors: Sequence[Tensor]) -> Tensor:
        x = tensors[0]
        out = torch.empty(0 if how == "empty" else x.shape, dtype=x.dtype, device=x.device)
        if how == "turned" and x.dim() > 1:
            out = torch.empty(*x.shape[:-2], x.shape[-1], x.shape[-2], dtype=x.dtype, device=x.device).mT
        return torch.add(x, x, out=out)

    return write


# What computes


def _places(x: Tensor, count: int) -> Tensor:
    """So many indices, of whole numbers alone: those of its numbers could fall to either side of one."""
    return torch.arange(count, device=x.device).mul(3).add(x.dim()).remainder(4)


table(
    "do",
    {
        "relu": lambda x: torch.relu(x if x.dtype != torch.bool else x.float()),
        "abs": lambda x: x.abs() if x.dtype != torch.bool else x,
        "sign": torch.sign,
        "double": lambda x: x.double(),
        "half": lambda x: x.clamp(-100, 100).half() if x.dtype != torch.bool else x.half(),
        "float": lambda x: x.float(),
        "clone": torch.clone,
        "contiguous": lambda x: x.contiguous(),
        "any": torch.any,
        "isnan": torch.isnan,
        "logical_not": torch.logical_not,
        "zeros_like": torch.zeros_like,
        "tanh": lambda x: torch.tanh(_real(x)),
        "exp": lambda x: torch.exp(_real(x).clamp(-5, 5)),
        "sigmoid": lambda x: torch.sigmoid(_real(x)),
        "gelu": lambda x: nn.functional.gelu(_real(x).float()),
        "rsqrt": lambda x: (_real(x).square() + 1).rsqrt(),
        "nonzero": torch.nonzero,
        "by_mask": lambda x: x[x != 0],
        "tril": lambda x: x.tril() if x.dim() > 1 else x.clone(),
        "flip": lambda x: x.flip(list(range(x.dim()))),
        "repeat": lambda x: x.repeat(2, *([1] * x.dim()))[:3],
        "unbind": lambda x: torch.stack(list(x.unbind())) if x.dim() and x.shape[0] else x.clone(),
        "neg_view": lambda x: torch._neg_view(x).clone() if x.dtype != torch.bool else x.clone(),
    },
)
table(
    "do",
    {
        "add": lambda x, y: x + y,
        "mul": lambda x, y: x * y,
        "sub": lambda x, y: _real(x) - _real(y),
        "div": lambda x, y: _real(x) / (_real(y).square() + 1),
        "maximum": torch.maximum,
        "less": lambda x, y: x < y,
        "equal": lambda x, y: torch.eq(x, y),
        "where": lambda x, y: torch.where(x > y, x, y),
        "pow": lambda x, y: _real(x).abs().clamp(0.1, 3) ** _real(y).clamp(-2, 2),
        "outer": lambda x, y: torch.outer(_real(x).reshape(-1)[:5], _real(y).reshape(-1)[:5].to(_real(x).dtype)),
        "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
        "stack": lambda x, y: torch.stack([x, y.to(x.dtype)]) if x.shape == y.shape else x.clone(),
    },
    operands=2,
)


def _real(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def _line(x: Tensor, count: int) -> Tensor:
    """So many of its numbers, over again where there are fewer, between −1 and 1."""
    some = torch.tanh(x.float().nan_to_num(0, 1, -1)).reshape(-1)
    return torch.cat([some, torch.linspace(-1, 1, count, device=x.device)])[:count]


table(
    "do",
    {
        "matmul": lambda x: _line(x, 6).reshape(2, 3) @ _line(x, 12).reshape(3, 4),
        "bmm": lambda x: torch.bmm(_line(x, 12).reshape(2, 2, 3), _line(x, 18).reshape(2, 3, 3).mT),
        "linear": lambda x: nn.functional.linear(_line(x, 8).reshape(2, 4), _line(x, 12).reshape(3, 4), _line(x, 3)),
        "conv": lambda x: nn.functional.conv2d(
            _line(x, 50).reshape(1, 2, 5, 5), _line(x, 54).reshape(3, 2, 3, 3), _line(x, 3), padding=1
        ),
        "conv_transpose": lambda x: nn.functional.conv_transpose1d(
            _line(x, 8).reshape(1, 2, 4), _line(x, 18).reshape(2, 3, 3), stride=2
        ),
        "max_pool": lambda x: nn.functional.max_pool2d(_line(x, 32).reshape(1, 2, 4, 4), 2),
        "avg_pool": lambda x: nn.functional.avg_pool2d(_line(x, 32).reshape(1, 2, 4, 4), 2, padding=1),
        "layer_norm": lambda x: nn.functional.layer_norm(_line(x, 12).reshape(3, 4), (4,), _line(x, 4)),
        "batch_norm": lambda x: nn.functional.batch_norm(
            _line(x, 24).reshape(4, 2, 3), _line(x, 2), _line(x, 2).square() + 1, training=True
        ),
        "group_norm": lambda x: nn.functional.group_norm(_line(x, 24).reshape(2, 4, 3), 2),
        "attention": lambda x: nn.functional.scaled_dot_product_attention(*[_line(x, 24).reshape(1, 2, 3, 4)] * 3),
        "embedding": lambda x: nn.functional.embedding(_places(x, 4), _line(x, 12).reshape(4, 3)),
        "cross_entropy": lambda x: nn.functional.cross_entropy(_line(x, 12).reshape(3, 4), _places(x, 3)),
    },
)


@step
def do_reduce(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    dim, keep = _dim(rng, like[0]), rng.random() < 0.5
    name = rng.choice(["sum", "mean", "amax", "argmax", "all", "cumsum", "softmax", "var", "sort", "prod", "logsumexp"])

    def reduce(tensors: Sequence[Tensor]) -> Any:
        x = tensors[0]
        if name in ("mean", "var", "softmax", "logsumexp", "prod"):
            x = _real(x).double().clamp(-3, 3)
        if not x.numel() and name in ("amax", "argmax"):
            return x.clone()
        if name == "sort":
            return x.sort(dim, stable=True)[0]
        if name in ("cumsum", "softmax"):
            return getattr(x, name)(dim)
        return getattr(x, name)(dim, keepdim=keep)

    return reduce


@step
def do_gather(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    size = like[0].shape[0] if like[0].dim() else 0
    if not size:
        return lambda tensors: tensors[0].clone()
    places = [rng.randrange(-size, size) for _ in range(rng.randint(0, 4))]
    names = rng.choice(["index", "index_select", "take"])

    def gather(tensors: Sequence[Tensor]) -> Tensor:
        x = tensors[0]
        at = torch.tensor(places, dtype=torch.int64, device=x.device)
        if names == "index":
            return x[at]
        if names == "take":
            return torch.take(x, at[:1]) if x.numel() else x.clone()
        return x.index_select(0, at % size)

    return gather


@step
def do_differentiate(rng: random.Random, like: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    names = rng.sample(["sin", "tanh", "square", "view", "write", "matmul", "softmax", "slice"], 3)
    parts: dict[str, Callable[[Tensor], Tensor]] = {
        "sin": torch.sin,
        "tanh": torch.tanh,
        "square": torch.square,
        "view": lambda x: x.mT,
        "write": lambda x: x.clone().mul_(2),
        "matmul": lambda x: x @ x.mT,
        "softmax": lambda x: x.softmax(-1),
        "slice": lambda x: x[:, 1:],
    }

    def differentiate(tensors: Sequence[Tensor]) -> Tensor:
        with torch.enable_grad():
            x = _line(tensors[0], 12).reshape(3, 4).detach().requires_grad_()
            y = x
            for name in names:
                y = parts[name](y)
            y.sum().backward()
        assert x.grad is not None
        return x.grad

    return differentiate


# Copies


def _saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


def _over_its_storage(x: Tensor) -> Tensor:
    whole = x.contiguous()
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride())


table(
    "copy",
    {
        "there_and_back": lambda x: x.cpu().clone().to(x.device),
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "save": _saved,
        "storage": _over_its_storage,
        "resize": lambda x: x.detach().clone().resize_(max(x.numel() // 2, 0)),
        "of_the_cpu": lambda x: x.detach().clone().copy_(torch.ones(x.shape, dtype=x.dtype)),
        "item": lambda x: torch.tensor(x.reshape(-1)[0].item(), device=x.device) if x.numel() else x.clone(),
    },
)


# Programs


@dataclass
class Program:
    """Steps, as they are drawn."""

    rng: random.Random
    tell: Callable[[str], object] = str
    said: list[str] = field(default_factory=list)
    mismatch: str = ""

    def run(self) -> None:
        """Take the steps, until one gives something else on the device than on the CPU."""
        rng = self.rng
        pairs = [self._made(rng) for _ in range(3)]
        for _ in range(rng.randint(4, 16)):
            name = rng.choice(list(STEPS))
            chosen = rng.sample(pairs, min(2, len(pairs)))
            self.said.append(f"{name} of {', '.join(_described(pair.theirs) for pair in chosen)}")
            self.tell(self.said[-1])
            results = self._both(name, rng, chosen)
            if self.mismatch:
                return
            pairs += results
            while len(pairs) > _MOST_TENSORS or (len(pairs) > 3 and rng.random() < 0.3):
                del pairs[rng.randrange(len(pairs))]
            if rng.random() < 0.05:
                gc.collect()

    def _made(self, rng: random.Random) -> Pair:
        dtype, shape = rng.choice(DTYPES), [rng.choice(SIZES) for _ in range(rng.randint(0, 3))]
        numbers = torch.Generator().manual_seed(rng.randrange(2**31))
        drawn = torch.randn(shape, generator=numbers, dtype=torch.float64) * 3
        theirs = (drawn if dtype.is_floating_point else drawn.abs().round()).to(dtype)
        return Pair(theirs.to("ort"), theirs)

    def _both(self, name: str, rng: random.Random, chosen: Sequence[Pair]) -> list[Pair]:
        """A step on both devices: both give the same, or both refuse; the device may compute what the CPU does not."""
        if name.startswith("write") and not all(_writable(pair.theirs) for pair in chosen):
            return []
        function = STEPS[name](rng, [pair.theirs for pair in chosen])
        expected, theirs = _attempted(function, [pair.theirs for pair in chosen])
        actual, ours = _attempted(function, [pair.ours for pair in chosen])
        shares = name.startswith(("view", "write"))
        if ours is not None and theirs is None:
            return self._wrong(f"refused by the device: {ours!r}")
        if theirs is not None:
            strides = "stride" in str(theirs)  # a result without elements may have others than the CPU's
            alone = shares and not strides and ours is None
            return self._wrong(f"refused by the CPU alone: {theirs!r}") if alone else []
        for pair in (*chosen, *(Pair(a, b) for a, b in zip(actual, expected, strict=True))):
            problem = _difference(pair)
            if problem:
                return self._wrong(problem)
        results = [Pair(a, b) for a, b in zip(actual, expected, strict=True) if _small(b)]
        if name.startswith("do"):
            _make_same(results, {pair.ours.untyped_storage().data_ptr() for pair in chosen})
        return results

    def _wrong(self, problem: str) -> list[Pair]:
        self.mismatch = f"{self.said[-1]}: {problem}"
        return []


def _attempted(function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[list[Tensor], Exception | None]:
    try:
        result = function(list(tensors))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        return [], error
    return list(result) if isinstance(result, (tuple, list)) else [result], None


def _small(x: Tensor) -> bool:
    return x.numel() <= _MOST_ELEMENTS and x.dim() <= 5


def _make_same(results: Sequence[Pair], held: set[int]) -> None:
    """Put the CPU's numbers into new memory of the device, so that what follows starts from the same."""
    for pair in results:
        if pair.theirs.is_floating_point() and pair.ours.untyped_storage().data_ptr() not in held:
            pair.ours.detach().copy_(pair.theirs)


def _difference(pair: Pair) -> str:
    ours, theirs = pair.ours.detach().cpu(), pair.theirs.detach()
    if pair.ours.device.type != "ort":
        return f"a result is on {pair.ours.device}"
    if pair.ours.stride() != theirs.stride() and pair.ours._is_view() and theirs._is_view() and theirs.numel() > 1:
        return f"strides {pair.ours.stride()} instead of {theirs.stride()}"
    tolerance = TOLERANCE.get(theirs.dtype, 0.0)
    try:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:200]
    return ""


def _described(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]}{list(x.shape)}{'' if x.is_contiguous() else f' strides {list(x.stride())}'}"


# The run


class Stress:
    """Batches of programs in several threads, and what became of them."""

    def __init__(self, batch: int, last: Path) -> None:
        self._batches, self._last = iter(range(batch, sys.maxsize)), last
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}
        self.programs = 0
        self.mismatches: list[str] = []
        self.steps: Counter[str] = Counter()

    def run(self, until: Callable[[], bool], threads: int) -> None:
        """Until a time has come, in so many threads at once."""
        workers = [threading.Thread(target=self._work, args=(until,)) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _work(self, until: Callable[[], bool]) -> None:
        while not until():
            number = self._next()
            problem = batch(number, self._count)
            if problem:
                with self._lock:
                    self.mismatches.append(f"batch {number}: {problem}")

    def _next(self) -> int:
        with self._lock:
            number = self._running[threading.get_ident()] = next(self._batches)
            running = " ".join(map(str, sorted(self._running.values())))
            self._last.write_text(f"python -m tests.eager.stress --batches {running}\n")
        return number

    def _count(self, program: Program) -> None:
        with self._lock:
            self.programs += 1
            self.steps.update(said.split()[0] for said in program.said)


def batch(number: int, done: Callable[[Program], object], tell: Callable[[str], object] = str) -> str:
    """Let hypothesis draw the programs of a batch; the smallest that goes wrong, or nothing."""
    smallest: list[Program] = []

    @seed(number)
    @settings(max_examples=_A_BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def right(rng: random.Random) -> None:
        program = Program(rng, tell)
        smallest[:] = [program]
        try:
            with torch.no_grad():  # which a thread has to itself
                program.run()
        finally:
            done(program)
        assert not program.mismatch, program.mismatch

    try:
        right()
    except Exception as error:
        return "; ".join((*smallest[0].said[:-1], smallest[0].mismatch or f"{smallest[0].said[-1:]}: {error!r}"))
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, tell how it goes, sum up."""
    parser = argparse.ArgumentParser(prog="python -m tests.eager.stress", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="batches at once (default: 2)")
    parser.add_argument("--batches", type=int, nargs="*", help="these alone, with their steps, one by one")
    parser.add_argument("--executor", help="of the device (default: its own choice)")
    parser.add_argument("--last", type=Path, default=Path("build/stress-last.txt"), help="where the last is written")
    asked = parser.parse_args(arguments)
    eager.enable(fallback="quiet", **({} if asked.executor is None else {"executor": asked.executor}))
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # of programs that torch refuses
    if asked.batches:
        return _again(asked.batches)
    asked.last.parent.mkdir(parents=True, exist_ok=True)
    return _for_minutes(Stress(asked.first, asked.last), asked.minutes, asked.threads)


def _for_minutes(stress: Stress, minutes: float, threads: int) -> int:
    end = time.monotonic() + 60 * minutes
    told = [time.monotonic()]

    def over() -> bool:
        if time.monotonic() - told[0] > 30:
            told[0] = time.monotonic()
            print(
                f"{stress.programs} programs, {stress.steps.total()} steps, {len(stress.mismatches)} wrong", flush=True
            )
        return time.monotonic() > end

    stress.run(over, threads)
    for mismatch in stress.mismatches[:20]:
        print(mismatch)
    print(f"{stress.programs} programs, {stress.steps.total()} steps of {len(stress.steps)} kinds, ", end="")
    print(f"{len(eager.stats().calls)} ATen operators, {len(stress.mismatches)} mismatches")
    return int(bool(stress.mismatches))


def _again(numbers: Sequence[int]) -> int:
    problems = [batch(number, lambda program: print(), functools.partial(print, flush=True)) for number in numbers]
    print("\n".join(problem or "right" for problem in problems))
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
