"""The ways users come in."""
