"""Imported before all else that the tests' processes are forked with, and keep: without searches for garbage."""

import gc

gc.disable()
