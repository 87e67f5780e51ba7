"""Last stage: run sessions on torch tensors without copying them."""
