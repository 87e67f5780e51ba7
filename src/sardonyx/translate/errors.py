"""The one way a translation says no."""

from __future__ import annotations


class Unsupported(Exception):
    """ONNX cannot express this call; the text says why. The partitioner turns it into a fallback or an error."""
