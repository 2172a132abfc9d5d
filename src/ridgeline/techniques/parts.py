"""The vocabulary in which cards declare what a technique owns, changes, needs and cannot be combined with."""

from __future__ import annotations

from typing import Literal, get_args

Part = Literal[
    "activations", "adapter_table", "batch_shape", "batch_split", "compiled_blocks", "compiled_pieces",
    "compute_dtype", "divided_experts", "divided_linears", "divided_tensors", "drafts", "dropped_blocks", "experts",
    "fused_attention", "fused_linears", "fused_loss", "fused_norms", "loss_scale", "low_rank", "masters",
    "model_shape", "optimizer", "packed_rows", "pass_memory", "phase_pools", "products", "queue", "rank_groups",
    "recomputation", "recorded_step", "relative_updates", "replicas", "resting_weights", "sequence_parts", "shards",
    "stages", "trainable", "weights", "whole_gradients", "zeros",
]  # fmt: skip

PARTS: dict[Part, str] = {
    "activations": "where saved activations are kept",
    "adapter_table": "which adapters a pass runs",
    "batch_shape": "the sizes of batches",
    "batch_split": "how data-parallel ranks share the batch",
    "compiled_blocks": "blocks compiled as one",
    "compiled_pieces": "what lies between the collectives of a block, compiled",
    "compute_dtype": "16-bit matrix products",
    "divided_experts": "experts divided over ranks",
    "divided_linears": "linear layers divided over ranks",
    "divided_tensors": "tensors of which a rank has a part",
    "drafts": "which tokens are drafted",
    "dropped_blocks": "where blocks of the cache go that the pool drops",
    "experts": "how experts are stored",
    "fused_attention": "attention without a score matrix",
    "fused_linears": "merged linear layers",
    "fused_loss": "the loss in a kernel of its own",
    "fused_norms": "fused norms",
    "loss_scale": "a scaled loss, whose gradients may overflow",
    "low_rank": "low-rank updates of linear layers",
    "masters": "a master copy of the weights, which is updated in their place",
    "model_shape": "the model's shape",
    "optimizer": "how the optimizer's states are kept and updated",
    "packed_rows": "batches without pads",
    "pass_memory": "where the results of a pass are placed",
    "phase_pools": "which servers compute prompts and which generate outputs",
    "products": "how linear layers multiply",
    "queue": "the order of the queue",
    "rank_groups": "which data-parallel ranks form inner groups",
    "recomputation": "blocks computed again in backward",
    "recorded_step": "a recorded step, whose operators and shapes must stay",
    "relative_updates": "updates sized by the parameters",
    "replicas": "whole parameters on every data-parallel rank",
    "resting_weights": "where weights rest between uses",
    "sequence_parts": "norms and residual additions divided along the sequence",
    "shards": "parameters as shards over data-parallel ranks",
    "stages": "which layers a rank has",
    "trainable": "which parameters train",
    "weights": "how weights are stored",
    "whole_gradients": "gradients that are kept whole through the backward pass",
    "zeros": "which weights are zero",
}
"""Every part, as refusals call it."""

assert set(get_args(Part)) == set(PARTS)
