"""The transformer and its layers."""
