"""Parameter-efficient fine-tuning: the base stays frozen."""
