"""Scheduling, memory and batching of a serving engine."""
