"""Text, chat examples and token ids, packed into batches."""
