"""To come with the measuring part of the simulator."""
