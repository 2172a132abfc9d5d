"""The time of one operator or collective."""
