"""The core: what a GPU is, what is wanted of it, and how to get there. Values and decisions only."""
