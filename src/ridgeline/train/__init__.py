"""The training engine: steps, evaluation, checkpoints."""
