"""T5 (arXiv:1910.10683; 1.1 and Flan-T5 too) and Switch Transformers (arXiv:2101.03961): encoder and decoder, relative
positions, scores that are not scaled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, activation

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
    tied = bool(c.get("tie_word_embeddings", True))
    scaled = c.get("scale_decoder_outputs", tied)  # transformers 5 writes it apart
    return {
        "family": c["model_type"],
        "vocab_size": c["vocab_size"],
        "hidden_size": c["d_model"],
        "num_layers": c.get("num_decoder_layers") or c["num_layers"],
        "encoder_layers": c["num_layers"],
        "num_heads": c["num_heads"],
        "num_kv_heads": c["num_heads"],
        "head_dim": c["d_kv"],
        "intermediate_size": c["d_ff"],
        "max_positions": c.get("n_positions", 512),
        "norm_eps": c.get("layer_norm_epsilon", 1e-6),
        "position": "relative",
        "relative_buckets": c.get("relative_attention_num_buckets", 32),
        "relative_distance": c.get("relative_attention_max_distance", 128),
        "attention_multiplier": 1.0,
        "logits_scaling": c["d_model"] ** 0.5 if scaled else None,
        "tie_embeddings": tied,
        "start_token": c.get("decoder_start_token_id") or 0,
    }


def _read_t5(c: Config) -> Config:
    proj = c.get("feed_forward_proj", "relu")
    gated, _, act = proj.rpartition("gated-")
    act = "gelu_new" if proj == "gated-gelu" else act
    return {**_read(c), "activation": activation(act), "gated": bool(gated or proj.startswith("gated-"))}


def _read_switch(c: Config) -> Config:
    steps = [c.get(f"num_{s}_layers" if s != "encoder" else "num_layers") or c["num_layers"] for s in _STACKS]
    sparse = [c.get(f"num_sparse_{s}_layers", 3) for s in _STACKS]
    every = {n // k if k else 0 for n, k in zip(steps, sparse, strict=True)}
    if 0 in every or len(every) > 1 or c.get("router_bias") or c.get("add_router_probs"):
        raise UserError("switch_transformers is supported with a mixture in every N-th layer of both stacks, whose"
                        " router has no bias",
                        "check num_sparse_encoder_layers and num_sparse_decoder_layers")  # fmt: skip
    step = every.pop()
    return {
        **_read(c),
        "activation": activation(c.get("dense_act_fn", "relu")),
        "gated": False,
        "num_experts": c["num_experts"],
        "experts_per_token": 1,
        "normalize_router": False,
        "moe_every": step,
        "moe_first": 1 if step > 2 else None,
        "expert_capacity": c.get("expert_capacity", 64),
    }


_STACKS = ("encoder", "decoder")


def _write(s: ModelSpec) -> Config:
    return {
        "vocab_size": s.vocab_size,
        "d_model": s.hidden_size,
        "d_kv": s.head_dim,
        "d_ff": s.intermediate_size,
        "num_layers": s.encoder_layers,
        "num_decoder_layers": s.num_layers,
        "num_heads": s.num_heads,
        "n_positions": s.max_positions,
        "layer_norm_epsilon": s.norm_eps,
        "relative_attention_num_buckets": s.relative_buckets,
        "relative_attention_max_distance": s.relative_distance,
        "decoder_start_token_id": s.start_token,
        "scale_decoder_outputs": s.logits_scaling is not None,
        "dropout_rate": 0.0,
        "is_encoder_decoder": True,
    }


def _write_t5(s: ModelSpec) -> Config:
    name = ACTIVATION_NAMES[s.activation]
    gated = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    own: Config = {"architectures": ["T5ForConditionalGeneration"], "feed_forward_proj": gated if s.gated else name}
    return {**_write(s), **own}


def _write_switch(s: ModelSpec) -> Config:
    return {
        **_write(s),
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "dense_act_fn": ACTIVATION_NAMES[s.activation],
        "num_experts": s.num_experts,
        "num_sparse_encoder_layers": s.encoder_layers // s.moe_every,
        "num_sparse_decoder_layers": s.num_layers // s.moe_every,
        "expert_capacity": s.expert_capacity,
        "router_jitter_noise": 0.0,
    }


def _attention(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{p}_proj": f"{theirs}.{p}" for p in "qkvo"}


def _feed_forward(layer: str, s: ModelSpec) -> dict[str, str]:
    inner = f"{layer}.{'mlp' if s.num_experts else 'DenseReluDense'}"
    up = (
        {"mlp.gate_proj": f"{inner}.wi_0", "mlp.up_proj": f"{inner}.wi_1"}
        if s.gated
        else {"mlp.up_proj": f"{inner}.wi"}
    )
    mixture = {"mlp.router": f"{inner}.router.classifier", "mlp.experts": f"{inner}.experts"}
    return {**up, **mixture, "mlp.down_proj": f"{inner}.wo", "mlp_norm": f"{layer}.layer_norm"}


def _encoder(s: ModelSpec) -> dict[str, str]:
    first = {"attention_norm": "layer.0.layer_norm", **_attention("attention", "layer.0.SelfAttention")}
    return {**first, **_feed_forward("layer.1", s)}


def _decoder(s: ModelSpec) -> dict[str, str]:
    first = {"attention_norm": "layer.0.layer_norm", **_attention("attention", "layer.0.SelfAttention")}
    cross = {"cross_norm": "layer.1.layer_norm", **_attention("cross_attention", "layer.1.EncDecAttention")}
    return {**first, **cross, **_feed_forward("layer.2", s)}


_REST = {
    "embed.tokens": "shared",
    "embed.encoder_relative": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "embed.decoder_relative": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder_norm": "encoder.final_layer_norm",
    "norm": "decoder.final_layer_norm",
    "head.out": "lm_head",
}
_EXPERTS = {"up_proj": "wi", "down_proj": "wo"}

FAMILIES = {
    "t5": Family(_read_t5, _write_t5, "decoder.block", _decoder, _REST, encoder_stack="encoder.block",
                 encoder_block=_encoder),
    "switch_transformers": Family(_read_switch, _write_switch, "decoder.block", _decoder, _REST, experts=_EXPERTS,
                                  expert="expert_{}", encoder_stack="encoder.block", encoder_block=_encoder),
}  # fmt: skip
