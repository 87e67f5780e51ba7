"""Entry points: the torch.compile backend, `sardonyx.compile`, `sardonyx.export` and `sardonyx.optimize`."""
