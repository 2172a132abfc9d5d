"""Collectives with gradients, and layers divided over ranks."""
