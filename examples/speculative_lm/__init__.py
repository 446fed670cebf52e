"""Speculative decoding with a small Mamba2 language model: see `__main__`."""
