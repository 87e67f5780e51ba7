"""PyTorch's own operator database, run through sardonyx."""
