"""Packages do not import each other in a circle. `make lint` checks the order of the layers as well."""

from __future__ import annotations

from graphlib import CycleError
from pathlib import Path

import pytest

from .package_graph import in_order, package_graph


def test_there_is_no_cycle_between_packages() -> None:
    order = in_order(package_graph())
    assert order.index("errors") < order.index("translate") < order.index("pipeline") < order.index("doors")


def test_a_cycle_is_found_also_inside_functions(tmp_path: Path) -> None:
    (tmp_path / "low").mkdir()
    (tmp_path / "low" / "a.py").write_text("def f():\n    from sardonyx import high\n")
    (tmp_path / "high.py").write_text("import sardonyx.low.a\n")
    with pytest.raises(CycleError):
        in_order(package_graph(tmp_path))
