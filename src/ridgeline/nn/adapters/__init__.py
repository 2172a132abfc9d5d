"""Adapters: the base is frozen, and each of its linear layers gets a small task-specific state."""
