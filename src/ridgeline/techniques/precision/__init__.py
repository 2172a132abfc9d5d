"""Number formats of training."""
