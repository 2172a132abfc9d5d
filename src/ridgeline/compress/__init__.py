"""Compression: stream a checkpoint block by block through the techniques of a plan, and write a smaller one."""
