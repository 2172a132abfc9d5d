"""Scheduling, memory and batching in a serving engine."""
