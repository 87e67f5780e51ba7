"""A differential fuzzer: random torch programs through every door, against eager; see `__main__`."""
