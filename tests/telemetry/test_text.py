"""Arguments and results of a call as lines of text."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sardonyx.telemetry.text import summarize, summarize_tensor

from .seen import Batch, X

Pair = namedtuple("Pair", "left right")


RAGGED = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)


class TestWords:
    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            (torch.tensor([1.0, -2.5]), "float32[2] cpu, -2.5 to 1, mean -0.75: [1, -2.5]"),
            (
                torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]),
                "float32[4] cpu, 1 to 1, mean 1, 1 NaN, 2 Inf: [1, nan, inf, -inf]",
            ),
            (torch.full((2,), torch.nan), "float32[2] cpu, none finite, 2 NaN: [nan, nan]"),
            (torch.tensor(2**62 + 1), f"int64[] cpu, {2**62 + 1} to {2**62 + 1}, mean 4.612e+18: {2**62 + 1}"),
            (torch.tensor([True, False]), "bool[2] cpu, 1 true: [True, False]"),
            (torch.tensor([3 + 4j]), "complex64[1] cpu, magnitude 5 to 5, mean 5: [3+4j]"),
            (torch.tensor([1.5], dtype=torch.bfloat16), "bfloat16[1] cpu, 1.5 to 1.5, mean 1.5: [1.5]"),
            (torch.tensor([1.5]).to(torch.float8_e5m2), "float8_e5m2[1] cpu, 1.5 to 1.5, mean 1.5: [1.5]"),
            (torch.tensor([65535], dtype=torch.uint16), "uint16[1] cpu, 65535 to 65535, mean 6.554e+04: [65535]"),
            (
                torch.tensor([2**64 - 1], dtype=torch.uint64),
                f"uint64[1] cpu, 1.845e+19 to 1.845e+19, mean 1.845e+19: [{2**64 - 1}]",
            ),
            (torch.empty(0, 3), "float32[0, 3] cpu, empty"),
            (torch.empty(2, device="meta"), "float32[2] meta, without values"),
            (torch.eye(2).to_sparse(), "float32[2, 2] cpu, values not strided"),
            (RAGGED, "NestedTensor float32[…] cpu, values not strided"),
            (torch.ones(1, requires_grad=True), "float32[1] cpu, requires grad, 1 to 1, mean 1: [1]"),
        ],
    )
    def test_a_tensor(self, tensor: torch.Tensor, words: str) -> None:
        assert summarize_tensor(tensor) == words

    def test_of_many_integers_the_first_are_shown(self) -> None:
        ids = torch.arange(100, 124).view(2, 12)
        head = "100, 101, 102, 103, 104, 105, 106, 107, …"
        assert summarize_tensor(ids) == f"int64[2, 12] cpu, 100 to 123, mean 111.5: {head}"
        assert summarize_tensor(ids.T.int()[:, :1].expand(12, 4)).endswith(": 100, 100, 100, 100, …")
        assert summarize_tensor(ids.float()) == "float32[2, 12] cpu, 100 to 123, mean 111.5"

    def test_of_a_large_tensor_some_elements_are_looked_at(self) -> None:
        words = summarize_tensor(torch.ones(1).expand(2**12, 2**12, 2**12))
        assert words == "float32[4096, 4096, 4096] cpu, 1 to 1, mean 1, 1048576 elements sampled"

    def test_containers_show_what_they_hold(self) -> None:
        value = {"batch": Batch(X, "cat"), "pair": Pair(X, [1, 2]), 3: (X, None), "plain": {"a": 1}}
        assert summarize("value", value) == [
            "value: dict",
            "  ['batch']: Batch",
            f"    .tokens: {summarize_tensor(X)}",
            "    .label: 'cat'",
            "  ['pair']: Pair",
            f"    .left: {summarize_tensor(X)}",
            "    .right: [1, 2]",
            "  [3]: tuple",
            f"    [0]: {summarize_tensor(X)}",
            "    [1]: None",
            "  ['plain']: {'a': 1}",
        ]

    def test_nothing_is_dumped_whole(self) -> None:
        class Circular:
            def __init__(self) -> None:
                self.me, self.x, self.text = self, X, "settings" * 100

        deep: Any = X
        for _ in range(100):
            deep = [deep]
        assert summarize("x", Circular()) == ["x: Circular", f"  .x: {summarize_tensor(X)}"]
        assert summarize("x", [X] * 1000)[-1] == "  … 984 more"
        assert len(summarize("x", "long" * 1000)[0]) < 100
        assert summarize("x", list(range(1000))) == ["x: [0, 1, 2, 3, 4, 5, ...]"]
        assert summarize("x", np.zeros((100, 100))) == ["x: ndarray float64[100, 100]"]
        assert summarize("x", nn.Linear(2, 2)) == ["x: <Linear>"]
        assert summarize("x", torch.float16) == ["x: torch.float16"]
        assert len("".join(summarize("x", deep))) < 200

    def test_modes_of_the_caller_see_nothing_of_it(self) -> None:
        class Counting(TorchDispatchMode):
            operators = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.operators += 1
                return func(*args, **(kwargs or {}))

        with Counting() as mode:
            _ = X + 1
            summarize_tensor(X)
        assert mode.operators == 1
