"""Hugging Face checkpoints, PEFT adapters and compressed formats, read and written."""
