"""Mapping between our model's parameters and the tensors of a Hugging Face checkpoint, family by family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec


class NamePair(NamedTuple):
    """One piece: ``ours[expert]`` equals ``theirs``, or its ``part``, transposed if so marked.

    One of our parameters may have several links (experts that the hub stores separately), and so may one of theirs
    (GPT-2's fused query, key and value).
    """

    ours: str
    theirs: str
    expert: int | None = None
    part: tuple[int, int, int, int] | None = None
    """(i, k, n, d): k of n equal parts along dimension d, from the i-th on."""
    transpose: bool = False


_LLAMA_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
_PHI3 = {
    **dict.fromkeys(("attention.q_proj", "attention.k_proj", "attention.v_proj"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
}
_MIXTRAL = {"mlp.router": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts"}
_LLAMA = {"embed.tokens": "model.embed_tokens", "norm": "model.norm", "head.out": "lm_head"}

_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_GPT2 = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head.out": "lm_head",
}

_OPT_BLOCK = {
    "attention_norm": "self_attn_layer_norm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_OPT = {
    "embed.tokens": "model.decoder.embed_tokens",
    "embed.positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "head.out": "lm_head",
}

_BERT_BLOCK = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_BERT = {
    "embed.tokens": "bert.embeddings.word_embeddings",
    "embed.positions": "bert.embeddings.position_embeddings",
    "embed.token_types": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.out": "cls.predictions.decoder",
}
_CLASSIFIER = {"head.dense": "bert.pooler.dense", "head.out": "classifier"}

# family → (prefix of its blocks, names in a block, names outside of blocks)
_TABLES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite"), ("model.layers", _LLAMA_BLOCK, _LLAMA)),
    "qwen3_moe": ("model.layers", {**_LLAMA_BLOCK, "mlp.router": "mlp.gate", "mlp.experts": "mlp.experts"}, _LLAMA),
    "phi3": ("model.layers", {**_LLAMA_BLOCK, **_PHI3}, _LLAMA),
    "mixtral": ("model.layers", {**_LLAMA_BLOCK, **_MIXTRAL}, _LLAMA),
    "gpt2": ("transformer.h", _GPT2_BLOCK, _GPT2),
    "opt": ("model.decoder.layers", _OPT_BLOCK, _OPT),
    "bert": ("bert.encoder.layer", _BERT_BLOCK, _BERT),
}

_MIXTRAL_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def require_twin(spec: ModelSpec) -> None:
    """Raise :class:`UserError` for a model that exists only as a spec."""
    if spec.family not in _TABLES or spec.is_encoder_decoder or spec.position in ("relative", "alibi"):
        raise UserError(f"model {spec.name!r} of family {spec.family!r} is spec only: it can be predicted, not run",
                        f"run a model of one of these families: {', '.join(_TABLES)}")  # fmt: skip


def links(spec: ModelSpec) -> Iterator[NamePair]:
    """Every piece of the model, in the layout of the hub's files (one tensor per expert).

    Raises :class:`UserError` for a family that is predicted, not run.
    """
    require_twin(spec)
    stack, block_names, names = _TABLES[spec.family]
    if spec.head == "classify":
        names = {**names, **_CLASSIFIER}
    for ours, _, block in spec.parameters():
        if not block.startswith("layers."):
            module, kind = ours.rsplit(".", 1)
            lone = ours == "head.out.bias" and spec.head == "mlm"
            theirs = "cls.predictions.bias" if lone else f"{names[module]}.{kind}"
            yield NamePair(ours, theirs)
            continue
        inner = ours.removeprefix(f"{block}.")
        prefix = f"{stack}.{block.removeprefix('layers.')}"
        module, kind = inner.rsplit(".", 1)
        if module == "mlp.experts":
            weight = _MIXTRAL_EXPERT[kind] if spec.family == "mixtral" else kind
            for e in range(spec.num_experts):
                yield NamePair(ours, f"{prefix}.{block_names[module]}.{e}.{weight}.weight", expert=e)
        elif spec.family == "gpt2":
            # GPT-2 stores [in, out], and query, key and value side by side in one tensor.
            transpose = kind == "weight" and "_norm" not in module
            fused = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
            if module in fused:
                part = (fused.index(module), 1, 3, -1)
                yield NamePair(ours, f"{prefix}.attn.c_attn.{kind}", part=part, transpose=transpose)
            else:
                yield NamePair(ours, f"{prefix}.{block_names[module]}.{kind}", transpose=transpose)
        else:
            yield NamePair(ours, f"{prefix}.{block_names[module]}.{kind}", part=_fused(spec, module))


def _fused(spec: ModelSpec, module: str) -> tuple[int, int, int, int] | None:
    """The part of a fused projection that ``module`` is, where the family has them (Phi-3)."""
    if spec.family != "phi3":
        return None
    q, kv = spec.num_heads, spec.num_kv_heads
    return {
        "attention.q_proj": (0, q, q + 2 * kv, 0),
        "attention.k_proj": (q, kv, q + 2 * kv, 0),
        "attention.v_proj": (q + kv, kv, q + 2 * kv, 0),
        "mlp.gate_proj": (0, 1, 2, 0),
        "mlp.up_proj": (1, 1, 2, 0),
    }.get(module)


def stacked(link: NamePair) -> NamePair | None:
    """The same piece in the layout of transformers ≥ 5, where a layer's experts are one tensor; None if it has none."""
    if link.expert is None:
        return link._replace(theirs=link.theirs.replace(".block_sparse_moe.gate.", ".mlp.gate."))
    prefix = re.split(r"\.block_sparse_moe\.|\.mlp\.", link.theirs)[0]
    if link.expert > 0:
        return None  # the first link stands for all
    if link.ours.endswith(".down_proj"):
        return NamePair(link.ours, f"{prefix}.mlp.experts.down_proj")
    part = (0 if link.ours.endswith(".gate_proj") else 1, 1, 2, 1)
    return NamePair(link.ours, f"{prefix}.mlp.experts.gate_up_proj", part=part)


def spellings(theirs: str) -> Iterator[str]:
    """The names under which a tensor is found in the hub's files, most likely first."""
    yield theirs
    for prefix in ("transformer.", "model.", "bert."):  # checkpoints saved without their head have no such prefix
        if theirs.startswith(prefix):
            yield theirs.removeprefix(prefix)
    if ".LayerNorm." in theirs:  # BERT as converted from TensorFlow
        yield theirs.replace(".weight", ".gamma").replace(".bias", ".beta")
    if theirs == "cls.predictions.bias":
        yield "cls.predictions.decoder.bias"
