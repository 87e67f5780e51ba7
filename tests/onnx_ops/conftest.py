"""Operators are called on the device too."""

from __future__ import annotations

from tests.eager.conftest import strict

__all__ = ["strict"]
