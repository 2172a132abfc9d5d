"""The real training engine: data, steps, checkpoints, processes."""
