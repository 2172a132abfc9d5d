"""Adapters: a frozen base that is never touched, and beside each of its linear layers a task's own small state."""
