"""Greedy generation by models of transformers: timed token by token, and two of them compared."""

from sardonyx.diagnose.generation.comparing import Divergence, GenerationComparison, compare_generations
from sardonyx.diagnose.generation.generating import Generation, check_generates, generate, random_prompt

__all__ = [
    "Divergence",
    "Generation",
    "GenerationComparison",
    "check_generates",
    "compare_generations",
    "generate",
    "random_prompt",
]
