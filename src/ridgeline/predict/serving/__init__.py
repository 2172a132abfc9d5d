"""Serving time: an engine's iterations and their schedule."""
