"""Translations of ATen operators, a family a file."""
