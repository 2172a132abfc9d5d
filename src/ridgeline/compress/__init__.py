"""Compression: a checkpoint is streamed block by block through the techniques of a plan, and written smaller."""
