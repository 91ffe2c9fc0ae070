"""The door to the GPUs: the only package that imports pynvml."""
