"""Print which packages of sardonyx import which, lowest first; imports inside functions count.

python -m tests.package_graph
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "sardonyx"


def package_graph(root: Path = ROOT) -> dict[str, set[str]]:
    """For each package, or module beside the packages, those that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).with_suffix("").parts[0]
        if name != "__init__":  # which gathers the public names from all of them
            graph.setdefault(name, set()).update(set(_imported(ast.parse(path.read_text()))) - {name})
    return graph


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "sardonyx":
            yield from (alias.name for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sardonyx."):
            yield str(node.module).split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("sardonyx."))


def in_order(graph: Mapping[str, set[str]]) -> list[str]:
    """The packages, each after those that it imports; raises `CycleError` where there is no such order."""
    return list(TopologicalSorter(graph).static_order())


def main() -> int:
    graph = package_graph()
    try:
        order = in_order(graph)
    except CycleError as error:
        print("a cycle: " + " → ".join(error.args[1]))
        return 1
    for name in order:
        print(f"{name} ← {', '.join(sorted(graph.get(name, ()), key=order.index)) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
