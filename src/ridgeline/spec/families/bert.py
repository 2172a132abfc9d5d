"""BERT (arXiv:1810.04805), with its head for masked tokens, a classifier, or ColBERT's projection of each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ridgeline.spec.errors import UserError
from ridgeline.spec.families.family import ACTIVATION_NAMES, Config, Family, activation

if TYPE_CHECKING:
    from ridgeline.spec.model import ModelSpec


COLBERT = "HF_ColBERT"
"""The architecture that ColBERT's checkpoints name."""
_WIDTHS = ("projection_dim", "colbert_dim", "dim")


_HEADER = 100_000_000
"""Bytes of a header that safetensors reads at most: what is longer is another kind of file."""


def with_projection(config: Config, folder: Path) -> Config:
    """A configuration with the width of ColBERT's projection, where only the weights in ``folder`` tell it."""
    if COLBERT not in (config.get("architectures") or []) or any(config.get(name) for name in _WIDTHS):
        return config
    try:
        with (folder / "model.safetensors").open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size if size < _HEADER else 0))
        return {**config, _WIDTHS[0]: int(header["linear.weight"]["shape"][0])}
    except (OSError, OverflowError, ValueError, KeyError, TypeError, IndexError):
        return config  # the reader says what is missing


def _read(c: Config) -> Config:
    h, heads = c["hidden_size"], c["num_attention_heads"]
    architectures = c.get("architectures") or []
    classifier = any(a.endswith("ForSequenceClassification") for a in architectures)
    projection = next((c[name] for name in _WIDTHS if c.get(name)), 0) if COLBERT in architectures else 0
    if COLBERT in architectures and not projection:
        what = "neither config.json nor a model.safetensors with linear.weight tells how wide its vectors are"
        raise UserError(f"{COLBERT}: {what}", f"write {_WIDTHS[0]} into config.json")
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
        "tie_embeddings": not (classifier or projection) and bool(c.get("tie_word_embeddings", True)),
        "causal": False,
        "post_norm": True,
        "token_types": c.get("type_vocab_size", 2),
        "embedding_norm": True,
        "final_norm": False,
        "head": "classify" if classifier else "project" if projection else "mlm",
        "projection_size": projection,
        "num_labels": len(c.get("id2label") or "ab") if classifier else 0,  # transformers' default is two
    }


def _write(s: ModelSpec) -> Config:
    labels = {str(i): f"LABEL_{i}" for i in range(s.num_labels)}
    numbers = {name: int(i) for i, name in labels.items()}
    more: Config = {"id2label": labels, "label2id": numbers} if labels else {}
    if s.projection_size:
        more = {_WIDTHS[0]: s.projection_size}
    architecture = "BertForSequenceClassification" if labels else COLBERT if s.projection_size else "BertForMaskedLM"
    return {
        **more,
        "architectures": [architecture],
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
    "project.out": "linear",
}

FAMILIES = {"bert": Family(_read, _write, "bert.encoder.layer", _BLOCK, _REST)}
