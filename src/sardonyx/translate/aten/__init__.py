"""Translations of ATen operators, one family per file."""
