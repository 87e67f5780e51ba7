"""Greedy generation with the time of each token, and what its cache of keys and values holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from sardonyx.capture.cache_buffers import address_of
from sardonyx.errors import SardonyxError

Prompt: TypeAlias = Mapping[str, Any]
"""Keyword arguments of `generate`, such as `input_ids` and `attention_mask`."""

_TOKENS = "input_ids"
_FACTORY_HINT = "let the factory return a model of transformers with a language head, as LlamaForCausalLM"
_PROMPT_HINT = "let the factory return (module, (), kwargs) with the keyword arguments of generate"
_CACHE_DEPTH = 8


@dataclass(frozen=True)
class Generation:
    """The tokens of one call of `generate`, and when each was there."""

    tokens: torch.Tensor
    """The new tokens, a row for each prompt."""
    logits: tuple[torch.Tensor, ...]
    """The model's own logits at each position, before processors; empty unless asked for."""
    seconds: tuple[float, ...]
    """Seconds from the call to each token."""
    cache_bytes: int
    """What the cache of keys and values holds at the end."""

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.seconds[0]

    @property
    def total(self) -> float:
        """Seconds to the last token."""
        return self.seconds[-1]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of decoding, of all rows together: from the first to the last."""
        return self.tokens.shape[0] * (len(self.seconds) - 1) / (self.total - self.first_token)


def check_generates(name: str, module: Any) -> None:
    """Raise unless a module has the `generate` of transformers."""
    if not callable(getattr(module, "generate", None)):
        raise SardonyxError(f"{name} is a {type(module).__name__}, which has no generate()", hint=_FACTORY_HINT)
    if not hasattr(module, "generation_config") or not module.can_generate():
        kind = type(module).__name__
        raise SardonyxError(f"{name} is a {kind}, whose generate() is not that of transformers", hint=_FACTORY_HINT)


def random_prompt(name: str, module: Any, tokens: int, batch: int, seed: int) -> Prompt:
    """Return random token ids, none of them special, and a mask of ones."""
    if module.main_input_name != _TOKENS:
        raise SardonyxError(f"{name} generates from {module.main_input_name}, not from tokens", hint=_PROMPT_HINT)
    generation = module.generation_config
    special = {generation.bos_token_id, generation.pad_token_id, *_as_list(generation.eos_token_id)}
    words = [word for word in range(module.get_input_embeddings().num_embeddings) if word not in special]
    chosen = torch.randint(len(words), (batch, tokens), generator=torch.Generator().manual_seed(seed))
    ids = torch.tensor(words)[chosen].to(module.device)
    return {_TOKENS: ids, "attention_mask": torch.ones_like(ids)}


def generate(
    module: Any,
    prompt: Prompt,
    tokens: int,
    *,
    keep_logits: bool = False,
    on_token: Callable[[int], object] = lambda number: None,
) -> Generation:
    """Generate exactly so many tokens greedily; `on_token` is called with the number of those that are there."""
    _check_positions(module, prompt, tokens)
    clock = _Clock(on_token)
    fill = {} if module.generation_config.pad_token_id is not None else {"pad_token_id": 0}
    with torch.no_grad():
        result = module.generate(
            **prompt,
            **fill,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_logits=keep_logits,
            streamer=clock,
        )
    new = result.sequences[:, -len(clock.seconds) :]
    cache = result.get("past_key_values")
    return Generation(new.cpu(), tuple(result.get("logits") or ()), tuple(clock.seconds), cache_bytes(cache))


@dataclass
class _Clock:
    """A streamer of transformers that records when each token arrives; the first `put` is the prompt."""

    on_token: Callable[[int], object]
    started: float = field(default_factory=time.perf_counter)
    seconds: list[float] = field(default_factory=list)
    _has_prompt: bool = False

    def put(self, value: torch.Tensor) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.seconds.append(time.perf_counter() - self.started)
        self.on_token(len(self.seconds))

    def end(self) -> None:
        """Nothing is left to write."""


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the tensors that a cache holds, each memory counted once, with what it is reserved for.

    >>> row = torch.zeros(4, 8)
    >>> cache_bytes([row, row[:2], {"more": torch.zeros(2)}])
    136
    """
    tensors = _tensors(cache, _CACHE_DEPTH)
    return sum({_address_of_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _address_of_storage(tensor: torch.Tensor) -> int:
    return address_of(tensor) - int(tensor.storage_offset()) * tensor.element_size()


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Return the tensors in containers and attributes of a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        for item in _items(value):
            yield from _tensors(item, depth - 1)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_positions(module: Any, prompt: Prompt, tokens: int) -> None:
    """Raise if the prompt and the new tokens exceed the model's positions: some models fail without a reason."""
    limit = getattr(module.config, "max_position_embeddings", None)
    ids = prompt.get(_TOKENS)
    if limit is None or ids is None or getattr(module.config, "is_encoder_decoder", False):
        return
    if ids.shape[1] + tokens > limit:
        raise SardonyxError(
            f"a prompt of {ids.shape[1]} and {tokens} new tokens exceed the {limit} positions of the model",
            hint="use a shorter prompt, or fewer new tokens",
        )
