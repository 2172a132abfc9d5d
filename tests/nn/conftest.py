import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from ridgeline.spec.model import ModelSpec

_LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5,
          "tie_word_embeddings": True}  # fmt: skip
_NEOX = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64, "rotary_pct": 0.5}  # fmt: skip
_FALCON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "max_position_embeddings": 64}  # fmt: skip
_DEEPSEEK = {**_LLAMA, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
             "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "n_shared_experts": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
_LLAMA4 = {**_LLAMA, "head_dim": 8, "intermediate_size_mlp": 56, "num_hidden_layers": 4, "num_local_experts": 4,
           "num_experts_per_tok": 1, "attention_chunk_size": 5, "floor_scale": 4, "attn_scale": 0.3,
           "pad_token_id": 0}  # fmt: skip
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4,
       "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "dropout_rate": 0.0,
       "decoder_start_token_id": 0}  # fmt: skip

CONFIGS = {
    "llama": {**_LLAMA, "model_type": "llama"},
    "llama_mha_bias_tied": {
        **_LLAMA,
        "model_type": "llama",
        "num_key_value_heads": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama3": {**_LLAMA, "model_type": "llama", "rope_scaling": _LLAMA3, "rope_theta": 500000.0, "head_dim": 16},
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen2_window": {
        **_LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    },
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "llama4": {**_LLAMA4, "model_type": "llama4_text"},
    "llama4_dense_between": {
        **_LLAMA4,
        "model_type": "llama4_text",
        "use_qk_norm": False,
        "interleave_moe_layer_step": 2,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "no_rope_layer_interval": 2,
        "num_hidden_layers": 2,
    },
    "mixtral": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_LLAMA,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "granite": {
        **_LLAMA,
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.5,
        "tie_word_embeddings": True,
    },
    "phi3": {
        **_LLAMA,
        "model_type": "phi3",
        "sliding_window": 7,
        "original_max_position_embeddings": 8,
        "rope_scaling": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 5.0],
        },
        "pad_token_id": 0,
    },
    "gemma": {
        **_LLAMA,
        "model_type": "gemma",
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gemma2": {
        **_GEMMA,
        "model_type": "gemma2",
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **_GEMMA,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 12,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
        },
    },
    "olmo2": {**_LLAMA, "model_type": "olmo2", "pad_token_id": 0},
    "olmo3": {
        **_LLAMA,
        "model_type": "olmo3",
        "pad_token_id": 0,
        "sliding_window": 5,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neox": {**_NEOX, "model_type": "gpt_neox"},
    "gpt_neox_sequential": {**_NEOX, "model_type": "gpt_neox", "use_parallel_residual": False, "rotary_pct": 1.0},
    "falcon": {**_FALCON, "model_type": "falcon"},
    "falcon_grouped": {**_FALCON, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_shared": {
        **_FALCON,
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
    },
    "gpt_oss": {
        **_LLAMA,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 5,
    },
    "deepseek_v2": {**_DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v2_grouped": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.0,
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "bloom": {"model_type": "bloom", "vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 64},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "opt": {
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "bert": {
        "model_type": "bert",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
}
PAIRS = {
    "t5": {**_T5, "model_type": "t5"},
    "t5_gated": {
        **_T5,
        "model_type": "t5",
        "feed_forward_proj": "gated-gelu",
        "num_decoder_layers": 1,
        "tie_word_embeddings": False,
    },
    "switch": {
        **_T5,
        "model_type": "switch_transformers",
        "num_decoder_layers": 2,
        "num_experts": 4,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 4,
        "router_jitter_noise": 0.0,
    },
    "switch_third": {
        **_T5,
        "model_type": "switch_transformers",
        "num_layers": 3,
        "num_decoder_layers": 3,
        "num_experts": 3,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "expert_capacity": 64,
        "router_jitter_noise": 0.0,
    },
}
"""Encoder-decoders."""
DECODERS = [name for name in CONFIGS if name != "bert"]


def spec_of(name: str) -> ModelSpec:
    return ModelSpec.from_config({**CONFIGS, **PAIRS}[name], name=name)


def randomize(model: torch.nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Weights far from their initial values (biases and norms too), so that every one of them shows in the logits."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=rng) * scale
            p.copy_(1 + noise if "norm" in name.lower() and name.endswith("weight") else noise)


@pytest.fixture
def ids():
    return torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(1))
