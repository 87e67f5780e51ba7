"""Last stage: torch tensors in and out of a session without a copy."""
