"""Optimizers with smaller states, and updates fused into the backward pass."""
