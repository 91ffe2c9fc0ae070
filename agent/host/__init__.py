"""The machine around us: the second door."""
