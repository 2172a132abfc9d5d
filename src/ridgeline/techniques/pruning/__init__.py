"""Pruning and sparsity."""
