"""Ridgeline: one Plan of LLM optimization techniques that you can predict, run, measure and search.

Importing this package imports neither torch nor numpy: the nouns of :mod:`ridgeline.spec` are plain data.
"""

__version__ = "0.1.0"
