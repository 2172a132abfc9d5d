"""Everything that this project claims about a GPU, measured on one in a single command: see ``__main__.py``."""
