"""T5 (arXiv:1910.10683) and Switch Transformers (arXiv:2101.03961): sizes only, they are predicted, not run."""

from __future__ import annotations

from ridgeline.spec.families.family import Config, Family


def _read(c: Config) -> Config:
    act = c.get("feed_forward_proj", "relu")
    layers = c["num_layers"]
    decoder = c.get("num_decoder_layers") or layers
    moe: Config = {}
    if c.get("num_experts", 1) > 1:
        sparse = c.get("num_sparse_encoder_layers", layers // 2)
        moe = {
            "num_experts": c["num_experts"],
            "experts_per_token": 1,
            "normalize_router": False,
            "moe_every": layers // sparse if sparse else 1,
        }
    return {
        "family": "t5",
        "vocab_size": c["vocab_size"],
        "hidden_size": c["d_model"],
        "num_layers": decoder,
        "encoder_layers": layers,
        "num_heads": c["num_heads"],
        "num_kv_heads": c["num_heads"],
        "head_dim": c["d_kv"],
        "intermediate_size": c["d_ff"],
        "max_positions": c.get("n_positions", 512),
        "norm_eps": c.get("layer_norm_epsilon", 1e-6),
        "activation": "gelu_tanh" if "gelu" in act else "relu",
        "gated": act.startswith("gated"),
        "position": "relative",
        "relative_buckets": c.get("relative_attention_num_buckets", 32),
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
        **moe,
    }


FAMILIES = {"t5": Family(_read), "switch_transformers": Family(_read)}
