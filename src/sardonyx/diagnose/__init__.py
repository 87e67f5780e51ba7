"""Seeing what happened: reports, dumps, comparisons."""
