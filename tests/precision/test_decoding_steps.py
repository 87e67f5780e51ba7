"""A step that decodes a token, in lower precision: past keys and values are not copied, and nothing is reshaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sardonyx
from sardonyx.native.linear import PRECISIONS
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.report import collecting
from tests.precision.compiling import compiled

HEADS, KEY_HEADS, SIZE, WIDTH = 4, 2, 16, 64

pytestmark = [
    pytest.mark.usefixtures("ranked"),
    pytest.mark.skipif(bool(PRECISIONS["bf16"].missing()), reason="no AVX512 for bfloat16"),
]


class Block(nn.Module):
    """A layer of a Llama that reads past keys and values, and may return them with its own."""

    def __init__(self, *, returns_cache: bool = False, rotates: bool = True) -> None:
        super().__init__()
        self.returns_cache, self.rotates = returns_cache, rotates
        self.norm, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, past: Sequence[torch.Tensor], mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.rotates:
            q, k = _rotate(q, angles), _rotate(k, angles)
        k, v = (torch.cat(parts, 2) for parts in zip(past, (k, v), strict=True))
        y = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        y = self.norm_2(x)
        y = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return (y, k, v) if self.returns_cache else (y,)


class Decoder(nn.Module):
    """Two of these layers, and a head."""

    def __init__(self, **how: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(**how), Block(**how)
        self.head = nn.Linear(WIDTH, 96)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, *past: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        half = positions[..., None] * torch.logspace(0, -2, SIZE // 2)
        angles = torch.cat([half, half], -1)
        x, *first = self.first(x, angles, past[:2], mask)
        x, *second = self.second(x, angles, past[2:], mask)
        return (self.head(x), *first, *second)


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """A rotary embedding, as transformers compute it."""
    left, right = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return x * cos + torch.cat([-right, left], -1) * sin


def inputs(batch: int = 1, tokens: int = 1, past: int = 40) -> tuple[torch.Tensor, ...]:
    positions = torch.arange(past, past + tokens, dtype=torch.float32).expand(batch, tokens)
    return torch.randn(batch, tokens, WIDTH), positions, *(torch.randn(batch, KEY_HEADS, past, SIZE) for _ in range(4))


def operators(model: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> Mapping[str, int]:
    """Check each result, and return the operators that ran."""
    with collecting() as report:
        results = compiled(model, precision="bf16", max_drop=1.0)(*args, **kwargs)
    for result, expected in zip(results, model(*args, **kwargs), strict=True):
        assert result.shape == expected.shape
        assert relative_error(result, expected) < 0.02
    (region,) = (region for graph in report.graphs for region in graph.regions)
    return region.operators


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_past_keys_and_values_are_not_copied_and_nothing_is_reshaped(batch: int, rotates: bool) -> None:
    found = operators(Decoder(rotates=rotates), *inputs(batch))
    assert not found.get("Concat")
    assert found.get("Reshape", 0) <= 1  # before the head, whose result is the graph's


@pytest.mark.parametrize("tokens", [2, 14])
def test_several_tokens_read_the_past_where_it_is(tokens: int) -> None:
    assert not operators(Decoder(rotates=False), *inputs(2, tokens)).get("Concat")


def test_a_mask_covers_the_past_and_the_tokens() -> None:
    mask = torch.zeros(2, 1, 1, 41)
    mask[0, ..., :7] = float("-inf")
    assert not operators(Decoder(rotates=False), *inputs(2), mask=mask).get("Concat")


def test_a_cache_that_is_returned_is_joined() -> None:
    assert operators(Decoder(rotates=False, returns_cache=True), *inputs(2))["Concat"] == 4


def test_the_length_of_the_past_may_be_symbolic() -> None:
    model = Decoder()
    run = compiled(model, dynamic=True, precision="bf16", max_drop=0.05)
    for batch, tokens, past in ((2, 1, 40), (3, 1, 7), (2, 5, 0), (1, 1, 0), (2, 1, 600)):
        args = inputs(batch, tokens, past)
        assert relative_error(run(*args)[0], model(*args)[0]) < 0.02


def test_a_compiled_module_appends_to_its_cache_in_place() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
    }
    config = transformers.LlamaConfig(vocab_size=100, num_hidden_layers=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    run = sardonyx.compile(model, precision="bf16", max_drop=1.0, cache_dir="")
    caches = [transformers.DynamicCache(config=config) for _ in range(2)]
    for tokens in torch.randint(100, (2, 9)).split([5, 1, 1, 1, 1], 1):
        result, expected = (
            call(tokens, past_key_values=cache) for call, cache in zip((run, model), caches, strict=True)
        )
        assert relative_error(result.logits, expected.logits) < 0.02
    regions = [region for graph in run.report.graphs for region in graph.regions]
    assert [region.in_place for region in regions][-1] == 4
    assert regions[-1].operators["GroupQueryAttention"] == 2
    assert any(name.startswith("Linear") for name in regions[-1].operators)
