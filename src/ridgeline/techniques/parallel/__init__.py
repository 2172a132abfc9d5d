"""Parallelism: data, tensor, sequence, context, pipeline and expert parallelism; ZeRO."""
