"""Everything that reads a snapshot and a sample: metrics, health, status, page."""
