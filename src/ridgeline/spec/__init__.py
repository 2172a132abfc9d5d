"""The nouns: pure data, no torch, imported in milliseconds."""
