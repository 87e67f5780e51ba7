"""Measurements of sardonyx beside other ways to run the same models."""
