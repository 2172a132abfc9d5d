"""The time and the peak memory of a training step."""
