"""The analytic model: operators and tensors of a step, as numbers."""

from ridgeline.graph.build_graph import (
    decode_graph,
    optimizer_ops,
    prefill_graph,
    resized,
    tokens_graph,
    training_graph,
)
from ridgeline.graph.graph import Block, Graph, Op, Param, Pipeline, Saved

__all__ = [
    "Block", "Graph", "Op", "Param", "Pipeline", "Saved", "decode_graph", "optimizer_ops", "prefill_graph",
    "resized",     "tokens_graph", "training_graph",
]  # fmt: skip
