"""Hugging Face ``config.json`` → ModelSpec fields, one reader per ``model_type``; and back, one writer per family."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ridgeline.spec.errors import UserError
from ridgeline.spec.rope import read_rope, write_rope

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec

Config = dict[str, Any]

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise UserError(f"activation {name!r} is not supported", f"supported: {', '.join(sorted(_ACTIVATIONS))}")
    return _ACTIVATIONS[name]


def _llama_like(c: Config) -> Config:
    heads = c["num_attention_heads"]
    return {
        "family": c["model_type"],
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": c.get("num_key_value_heads") or heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "intermediate_size": c["intermediate_size"],
        "max_positions": c.get("max_position_embeddings", 2048),
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "activation": _activation(c.get("hidden_act", "silu")),
        "tie_embeddings": bool(c.get("tie_word_embeddings", False)),
        **read_rope(c),
    }


def _llama(c: Config) -> Config:
    bias = bool(c.get("attention_bias", False))
    return {**_llama_like(c), "qkv_bias": bias, "out_bias": bias, "mlp_bias": bool(c.get("mlp_bias", False))}


def _granite(c: Config) -> Config:
    """Granite 3 (model cards of ibm-granite): Llama with four multipliers."""
    return {**_llama(c), **{k: c.get(k, 1.0) for k in _MULTIPLIERS}}


_MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def _mistral(c: Config) -> Config:
    return {**_llama_like(c), "sliding_window": c.get("sliding_window")}


def _phi3(c: Config) -> Config:
    """Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905)."""
    scaling = c.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":  # the name under which its first files have what is longrope now
        c = {**c, "rope_scaling": {**scaling, "rope_type": "longrope"}}
    return {**_llama_like(c), "sliding_window": c.get("sliding_window")}


def _qwen_window(c: Config) -> int | None:
    """Qwen's window applies from layer ``max_window_layers`` (default 28) on; ours to all layers or none."""
    first = c.get("max_window_layers", 28)
    window: int | None = c.get("sliding_window")
    if not c.get("use_sliding_window") or window is None or first >= c["num_hidden_layers"]:
        return None
    if first > 0:
        raise UserError(
            f"a sliding window from layer {first} of {c['num_hidden_layers']} on is not supported",
            "set max_window_layers to 0 (a window in every layer) or use_sliding_window to false",
        )
    return window


def _qwen2(c: Config) -> Config:
    return {**_llama_like(c), "qkv_bias": True, "sliding_window": _qwen_window(c)}


def _qwen3(c: Config) -> Config:
    bias = bool(c.get("attention_bias", False))
    base = {**_llama_like(c), "qkv_bias": bias, "out_bias": bias, "qk_norm": True, "sliding_window": _qwen_window(c)}
    return {**base, "head_dim": c.get("head_dim") or 128}


def _mixtral(c: Config) -> Config:
    moe = {"num_experts": c["num_local_experts"], "experts_per_token": c["num_experts_per_tok"]}
    return {**_llama_like(c), "sliding_window": c.get("sliding_window"), **moe}


def _qwen3_moe(c: Config) -> Config:
    """Every layer a mixture, as in the published models; a dense layer among them is not supported."""
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        raise UserError("qwen3_moe with dense layers between the mixtures is not supported")
    experts = c["num_experts"] if "num_experts" in c else c["num_local_experts"]  # transformers 5 renamed it
    return {
        **_qwen3({**c, "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]}),
        "intermediate_size": c["moe_intermediate_size"],
        "num_experts": experts,
        "experts_per_token": c["num_experts_per_tok"],
        "normalize_router": bool(c.get("norm_topk_prob", False)),
    }


def _gpt_oss(c: Config) -> Config:
    """gpt-oss (arXiv:2508.10925). Its YaRN-scaled rotary embedding changes no size and is left out."""
    kinds = c.get("layer_types") or ["sliding_attention", "full_attention"]
    moe = {"num_experts": c["num_local_experts"], "experts_per_token": c["num_experts_per_tok"], "moe_bias": True}
    plain = {k: v for k, v in c.items() if k not in ("rope_scaling", "rope_parameters")}
    return {
        **_llama_like({"rope_theta": 150000.0, **plain}),
        "qkv_bias": True,
        "out_bias": True,
        "sliding_window": c.get("sliding_window"),
        "window_every": 2 if "full_attention" in kinds else 1,
        "attention_sinks": True,
        **moe,
    }


def _bloom(c: Config) -> Config:
    h, heads = c["hidden_size"], c.get("n_head") or c["num_attention_heads"]
    return {
        "family": "bloom",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c.get("n_layer") or c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": 4 * h,
        "max_positions": c.get("seq_length", 2048),
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": "gelu_tanh",
        "gated": False,
        "position": "alibi",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "embedding_norm": True,
        "tie_embeddings": True,
    }


def _gpt2(c: Config) -> Config:
    h, heads = c["n_embd"], c["n_head"]
    return {
        "family": "gpt2",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": c.get("n_inner") or 4 * h,
        "max_positions": c.get("n_positions", 1024),
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(c.get("activation_function", "gelu_new")),
        "gated": False,
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
    }


def _opt(c: Config) -> Config:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    if not c.get("do_layer_norm_before", True) or c.get("word_embed_proj_dim", h) != h:
        raise UserError("OPT with post-normalization or projected embeddings (opt-350m) is not supported")
    bias = bool(c.get("enable_bias", True))
    return {
        "family": "opt",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": c["ffn_dim"],
        "max_positions": c["max_position_embeddings"],
        "position_offset": 2,
        "norm": "layernorm",
        "activation": _activation(c.get("activation_function", "relu")),
        "gated": False,
        "position": "learned",
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "tie_embeddings": bool(c.get("tie_word_embeddings", True)),
    }


def _bert(c: Config) -> Config:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    classifier = any(a.endswith("ForSequenceClassification") for a in c.get("architectures") or [])
    return {
        "family": "bert",
        "vocab_size": c["vocab_size"],
        "hidden_size": h,
        "num_layers": c["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": h // heads,
        "intermediate_size": c["intermediate_size"],
        "max_positions": c["max_position_embeddings"],
        "norm": "layernorm",
        "norm_eps": c.get("layer_norm_eps", 1e-12),
        "activation": _activation(c.get("hidden_act", "gelu")),
        "gated": False,
        "position": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": not classifier and bool(c.get("tie_word_embeddings", True)),
        "causal": False,
        "post_norm": True,
        "token_types": c.get("type_vocab_size", 2),
        "embedding_norm": True,
        "final_norm": False,
        "head": "classify" if classifier else "mlm",
        "num_labels": len(c.get("id2label") or "ab") if classifier else 0,  # transformers' default is two
    }


def _t5(c: Config) -> Config:
    """T5 and Switch Transformers (sizes only; the torch twin does not run encoder-decoder models)."""
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


READERS: dict[str, Callable[[Config], Config]] = {
    "llama": _llama,
    "granite": _granite,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "bloom": _bloom,
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "t5": _t5,
    "switch_transformers": _t5,
}


# ---- the inverse: ModelSpec → config.json ----------------------------------------------------------------------------

_ACTIVATION_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


def to_hf_config(spec: ModelSpec) -> Config:
    """The Hugging Face ``config.json`` of ``spec``: the inverse of :meth:`ModelSpec.from_config`.

    Dropout is written as 0, because the twin has none. Raises :class:`UserError` for a spec that its family's
    configuration cannot express, or a family that has no writer (t5).
    """
    if spec.family not in WRITERS:
        raise UserError(
            f"family {spec.family!r} has no Hugging Face config writer", f"families that have: {', '.join(WRITERS)}"
        )
    config = {"model_type": spec.family, "tie_word_embeddings": spec.tie_embeddings, **WRITERS[spec.family](spec)}
    restored = spec.from_config(config, name=spec.name)
    kept = set(type(spec).model_fields) - {"published_parameters", "source"}
    lost = sorted(f for f in kept if getattr(restored, f) != getattr(spec, f))
    if lost:
        wanted = ", ".join(f"{f} = {getattr(spec, f)!r}" for f in lost)
        raise UserError(
            f"a Hugging Face {spec.family} model cannot have {wanted}", "use a family whose configuration has this"
        )
    return config


def _write_llama_like(s: ModelSpec) -> Config:
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "num_key_value_heads": s.num_kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "rms_norm_eps": s.norm_eps,
        "hidden_act": _ACTIVATION_NAMES[s.activation],
        "rope_parameters": write_rope(s.rope_theta, s.rope_scaling),
    }


def _write_llama(s: ModelSpec) -> Config:
    return {
        **_write_llama_like(s),
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": s.qkv_bias,
        "mlp_bias": s.mlp_bias,
    }


def _write_granite(s: ModelSpec) -> Config:
    numbers = {k: getattr(s, k) for k in _MULTIPLIERS}
    return {**_write_llama(s), "architectures": ["GraniteForCausalLM"], **numbers}


def _write_mistral(s: ModelSpec) -> Config:
    return {**_write_llama_like(s), "architectures": ["MistralForCausalLM"], "sliding_window": s.sliding_window}


def _write_phi3(s: ModelSpec) -> Config:
    scaling = s.rope_scaling
    original = s.max_positions if scaling is None else scaling.original_max_positions
    config = {**_write_mistral(s), "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": original}
    # transformers' default for padding is Phi-3's own token, which a smaller vocabulary does not have.
    return {**config, "pad_token_id": 32000 if s.vocab_size > 32000 else None}


def _write_window(s: ModelSpec) -> Config:
    """Qwen's window, which starts at layer ``max_window_layers``."""
    windowed = s.sliding_window is not None
    window: Config = {"use_sliding_window": windowed, "max_window_layers": 0 if windowed else s.num_layers}
    return {**window, "sliding_window": s.sliding_window}


def _write_qwen2(s: ModelSpec) -> Config:
    return {**_write_llama_like(s), **_write_window(s), "architectures": ["Qwen2ForCausalLM"]}


def _write_qwen3(s: ModelSpec) -> Config:
    architecture: Config = {"architectures": ["Qwen3ForCausalLM"], "attention_bias": s.qkv_bias}
    return {**_write_llama_like(s), **_write_window(s), **architecture}


def _write_qwen3_moe(s: ModelSpec) -> Config:
    return {
        **_write_qwen3(s),
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": s.intermediate_size,
        "num_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
        "norm_topk_prob": s.normalize_router,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_mixtral(s: ModelSpec) -> Config:
    return {
        **_write_llama_like(s),
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": s.sliding_window,
        "num_local_experts": s.num_experts,
        "num_experts_per_tok": s.experts_per_token,
    }


def _write_gpt2(s: ModelSpec) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": s.vocab_size,
        "n_embd": s.hidden_size,
        "n_layer": s.num_layers,
        "n_head": s.num_heads,
        "n_inner": s.intermediate_size,
        "n_positions": s.max_positions,
        "layer_norm_epsilon": s.norm_eps,
        "activation_function": _ACTIVATION_NAMES[s.activation],
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _write_opt(s: ModelSpec) -> Config:
    return {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "word_embed_proj_dim": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "ffn_dim": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "activation_function": _ACTIVATION_NAMES[s.activation],
        "enable_bias": s.qkv_bias,
        "do_layer_norm_before": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _write_bert(s: ModelSpec) -> Config:
    labels = {str(i): f"LABEL_{i}" for i in range(s.num_labels)}
    numbers = {name: int(i) for i, name in labels.items()}
    classifier: Config = {"id2label": labels, "label2id": numbers} if labels else {}
    return {
        **classifier,
        "architectures": ["BertForSequenceClassification" if labels else "BertForMaskedLM"],
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": s.num_heads,
        "intermediate_size": s.intermediate_size,
        "max_position_embeddings": s.max_positions,
        "type_vocab_size": s.token_types,
        "layer_norm_eps": s.norm_eps,
        "hidden_act": _ACTIVATION_NAMES[s.activation],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


WRITERS: dict[str, Callable[[ModelSpec], Config]] = {
    "llama": _write_llama,
    "granite": _write_granite,
    "mistral": _write_mistral,
    "qwen2": _write_qwen2,
    "qwen3": _write_qwen3,
    "phi3": _write_phi3,
    "qwen3_moe": _write_qwen3_moe,
    "mixtral": _write_mixtral,
    "gpt2": _write_gpt2,
    "opt": _write_opt,
    "bert": _write_bert,
}
