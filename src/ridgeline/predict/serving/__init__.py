"""The time of serving: an engine's iterations and the schedule that makes them."""
