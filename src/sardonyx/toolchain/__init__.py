"""Compilers: found, called, and what they built kept."""
