"""The option --generate of commands, and what generates: a model, its prompt, and how many tokens."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click
import torch

from sardonyx.cli._messages import stdout_to_stderr
from sardonyx.cli._source import Inputs, Source, option_keywords
from sardonyx.diagnose.generation import Generation, check_generates, generate, random_prompt
from sardonyx.doors.module import CompiledModule, compile
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.options import Options

F = TypeVar("F", bound=Callable[..., Any])

_USUAL_PROMPT, _USUAL_BATCH, _USUAL_TOKENS = 32, 1, 32
_NOT_FOR_GENERATE = "labels"
_HINT = "--prompt and --batch make random prompts; example arguments of MODEL are used without them"


@dataclass(frozen=True)
class GenerationRequest:
    """The options --prompt, --batch and --new-tokens; None stands for the example arguments, or the usual size."""

    prompt: int | None = None
    batch: int | None = None
    tokens: int = _USUAL_TOKENS


def generation_options(command: F) -> F:
    """Add --generate and what it takes, as the parameter `generation`: None without --generate."""

    @functools.wraps(command)
    def with_generation(
        *args: Any, generate: bool, prompt: int | None, batch: int | None, new_tokens: int | None, **kwargs: Any
    ) -> Any:
        if not generate and (prompt, batch, new_tokens) != (None, None, None):
            raise OptionError("--prompt, --batch and --new-tokens are for generating", hint="add --generate")
        request = GenerationRequest(prompt, batch, new_tokens or _USUAL_TOKENS) if generate else None
        return command(*args, generation=request, **kwargs)

    help_text = f"New tokens of each prompt with --generate; default: {_USUAL_TOKENS}."
    with_generation = click.option("--new-tokens", type=click.IntRange(2), help=help_text)(with_generation)
    help_text = f"Prompts at once with --generate; default: {_USUAL_BATCH}."
    with_generation = click.option("--batch", type=click.IntRange(1), help=help_text)(with_generation)
    help_text = (
        f"Tokens of a random prompt with --generate; default: the example arguments of MODEL, or {_USUAL_PROMPT}."
    )
    with_generation = click.option("--prompt", type=click.IntRange(1), help=help_text)(with_generation)
    help_text = "Generate tokens greedily by generate() of transformers."
    return click.option("--generate", is_flag=True, help=help_text)(with_generation)  # type: ignore[return-value]  # wraps it


class Generator:
    """A model of a command that generates tokens, and its prompt."""

    def __init__(self, model: Source, request: GenerationRequest, inputs: Inputs) -> None:
        if inputs:
            raise OptionError("--inputs and --size cannot be used with --generate", hint=_HINT)
        self.name, self.tokens = model.text, request.tokens
        self.module = model.module()
        check_generates(model.text, self.module)
        self._prompt = self._choose_prompt(model, request, inputs.seed)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the prompt and of what is generated."""
        first = next(value for value in self._prompt.values() if isinstance(value, torch.Tensor))
        return {"prompt": first.shape[1], "batch": first.shape[0], "new_tokens": self.tokens}

    def compiled(self, options: Options) -> CompiledModule:
        """Return the model with its forward compiled by sardonyx."""
        return compile(self.module, **option_keywords(options))

    def generate(self, module: Any, say: Callable[[str], object], keep_logits: bool = False) -> Generation:
        """Generate once by a form of the model; `say` is told each token."""

        def on_token(number: int) -> None:
            say(f"token {number} of {self.tokens}")

        try:
            with stdout_to_stderr():
                return generate(module, self._prompt, self.tokens, keep_logits=keep_logits, on_token=on_token)
        except (TypeError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            hint = "call its generate() with max_new_tokens=2 and the same arguments; sardonyx --debug … shows where"
            raise SardonyxError(f"{self.name} cannot generate: {reason}", hint=hint) from error

    def _choose_prompt(self, model: Source, request: GenerationRequest, seed: int) -> Mapping[str, Any]:
        example = model.example() if request.prompt is request.batch is None else None
        if example is not None and any(example):
            return self._example_prompt(*example)
        prompt, batch = request.prompt or _USUAL_PROMPT, request.batch or _USUAL_BATCH
        return random_prompt(model.text, self.module, prompt, batch, seed)

    def _example_prompt(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return example arguments of forward as keyword arguments of generate."""
        given = {**inspect.signature(self.module.forward).bind_partial(*args).arguments, **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        tensors.pop(_NOT_FOR_GENERATE, None)
        main = self.module.main_input_name
        if main not in tensors:
            raise SardonyxError(f"the example arguments of {self.name} have no {main}", hint=_HINT)
        return tensors
