"""gpunode: the node agent for machines with NVIDIA GPUs that are split by MIG."""

__version__ = "0.1.0"
