"""Sessions kept for reuse."""
