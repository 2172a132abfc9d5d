"""BERT (arXiv:1810.04805), with its head for masked tokens or a classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, activation

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


def _read(c: Config) -> Config:
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
        "activation": activation(c.get("hidden_act", "gelu")),
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


def _write(s: ModelSpec) -> Config:
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
        "hidden_act": ACTIVATION_NAMES[s.activation],
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


_BLOCK = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_REST = {
    "embed.tokens": "bert.embeddings.word_embeddings",
    "embed.positions": "bert.embeddings.position_embeddings",
    "embed.token_types": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.out": "cls.predictions.decoder",
    "classify.dense": "bert.pooler.dense",
    "classify.out": "classifier",
}

FAMILIES = {"bert": Family(_read, _write, "bert.encoder.layer", _BLOCK, _REST)}
