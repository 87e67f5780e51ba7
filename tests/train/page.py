"""The results of the training sweep as a page for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

HEAD = """# Training, module by module

A step of each, forward and backward, through `torch.compile(backend="sardonyx")` with no fallback allowed. Every
result, the gradient of every parameter and of every floating-point argument, and every buffer after the step are
compared with the same step in PyTorch in double precision. The figure is the largest error of any of them, relative to
the largest element (for a gradient that cancels out, to the largest of any gradient). It must be at most 1e-5 for a
module, 1e-4 for an architecture, 1e-6 for the seed Llama. Written by `make train-sweep`; do not edit.

- static: compiled for one batch size.
- dynamic: compiled once with `dynamic=True`, every size symbolic; two batch sizes are run, and the second may not
  compile again where PyTorch by itself does not.
- in torch: dynamo hands nothing of it to a backend; the step is PyTorch's own.
- Modules that draw random numbers: the same seed gives the same step, another seed another one, and the gradient is
  that of what the forward drew.
- Recurrent networks are compiled under `torch._dynamo.config.allow_rnn = True`; by default dynamo leaves them to torch.
"""


def page(results: dict[str, Any]) -> str:
    """Markdown: totals, then a table for each family."""
    outcomes = results["outcomes"]
    made = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    failed = [o for o in outcomes if "wrong" in o or "crashed" in o]
    architectures = sum(o["family"] == "architectures" for o in outcomes)
    total = f"{len(outcomes) - architectures} modules and {architectures} architectures; {len(failed)} fail."
    lines = [HEAD, f"{results['date']}, CPU, with {made}.\n", f"{total}\n"]
    for family, group in groupby(outcomes, key=lambda o: o["family"]):
        lines += [f"| {family} | static | dynamic |", "|---|---|---|", *map(_row, group), ""]
    return "\n".join(lines)


def _row(outcome: dict[str, Any]) -> str:
    problems = [*outcome.get("wrong", []), *outcome.get("crashed", [])]
    cells = [_cell(outcome, way, problems) for way in ("static", "dynamic")]
    return f"| `{outcome['name']}` | {' | '.join(cells)} |"


def _cell(outcome: dict[str, Any], way: str, problems: list[str]) -> str:
    error = outcome.get("errors", {}).get(way)
    if error is not None:
        return f"{error:.0e}, in torch: {outcome['in_torch']}" if "in_torch" in outcome else f"{error:.0e}"
    if way == "dynamic" and "static" in outcome:
        return f"– ({outcome['static']})"
    problem = next((p for p in problems if p.startswith(way)), next(iter(problems), "not run"))
    return "**" + problem.replace("|", "\\|")[:160] + "**"
