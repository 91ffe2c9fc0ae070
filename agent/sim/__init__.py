"""A node with GPUs that is not there: loaded only by --simulate, and it stands below pynvml."""
