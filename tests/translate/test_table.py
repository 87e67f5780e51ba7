"""The table of translations itself."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch._inductor.inductor_prims  # registers prims::fma
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed

from sardonyx.translate import table

FOREIGN = ("transformers",)
"""Namespaces of packages that need not be installed."""

VERSIONED = frozenset({"aten::_grouped_mm", "aten::_fused_rms_norm"})
"""Operators that not every supported torch has."""


def exists(name: str) -> bool:
    namespace, _, qualified = name.partition("::")
    base, _, overload = qualified.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return packet is not None and (overload or "default") in packet.overloads()


@pytest.mark.parametrize("name", sorted(table.names()))
def test_every_operator_of_the_table_exists_in_torch(name: str) -> None:
    assert name.startswith(FOREIGN) or name in VERSIONED or exists(name)


def test_a_name_is_translated_once() -> None:
    with pytest.raises(ValueError, match="translated twice"):
        table.aten("relu")(lambda g, x: x)


def test_an_operator_that_is_in_no_table_is_not_found() -> None:
    assert table.find(torch.ops.aten.linalg_eig.default) is None


def test_a_translation_takes_the_arguments_of_its_operator() -> None:
    for name in table.names():
        if exists(name):
            namespace, qualified = name.split("::")
            base, _, overload = qualified.partition(".")
            target = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
            arguments = target._schema.arguments
            positional = [a.name for a in arguments if not a.kwarg_only]
            by_name = {a.name: None for a in arguments if a.kwarg_only}
            translation = table.find(target)
            assert translation is not None
            inspect.signature(translation).bind("g", *positional, **by_name)
