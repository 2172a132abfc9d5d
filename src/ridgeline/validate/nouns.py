"""The device and the model of a row: found by name, or made from the row's own columns."""

from __future__ import annotations

from pydantic import ValidationError

from ridgeline import catalog
from ridgeline.spec.device import Device, Link
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.validate.csv_table import MOST_LAYERS, MOST_TOKENS, BadCell, CsvRow
from ridgeline.validate.dtypes import precision_of

_BIASED = ("gpt", "gpt2", "gpt3", "megatron", "opt", "bloom", "gpt_neox", "gpt_neo", "gptj")
_PLAIN = (*_BIASED, "mpt", "falcon", "bert", "t5")
"""Families whose MLPs have no gate; their norms are LayerNorms."""
_POSITION = {"mpt": "alibi", "bloom": "alibi", "gpt_neox": "rope", "gptj": "rope", "falcon": "rope", "t5": "alibi"}
_TIED = ("gpt", "gpt2", "gpt3", "megatron", "opt", "bloom", "mpt", "gpt_neo", "falcon", "bert", "t5")
_EXPERTS = {"mixtral": (8, 2), "qwen3_moe": (128, 8), "gpt_oss": (128, 4)}
"""(experts, experts per token) of families that are mixtures, unless the row states them."""
_HOST = Link(name="PCIe", bandwidth=25e9, latency=5e-6, source="assumption")


def device_of(row: CsvRow, default: str | None = None) -> Device:
    """The row's device by name; one that is not known is made from columns ``peak_flops``, ``memory_bandwidth`` and
    ``memory_bytes`` (and ``link_bandwidth``, ``sm_count``, ``watts``, ``architecture``) where the row has them.

    Raises :class:`UserError` with the nearest names otherwise.
    """
    name = row.text("device", default)
    try:
        return catalog.device(name)
    except UserError:
        if not all(row.has(c) for c in ("peak_flops", "memory_bandwidth")):
            raise
    peak, bandwidth = (row.number(c, above=0.0) for c in ("peak_flops", "memory_bandwidth"))
    link = row.number("link_bandwidth", 0.0)
    return Device(
        name=name,
        architecture=row.text("architecture", ""),
        peak_flops={precision_of(row, "peak_dtype", "bf16"): peak},
        memory_bandwidth=bandwidth,
        memory_bytes=row.number("memory_bytes", 80e9, above=0.0) if not row.has("layers") else 80e9,
        sm_count=row.count("sm_count", 100),
        watts=row.number("watts", 0.0),
        link=Link(name="link", bandwidth=link, latency=2e-6) if link > 0 else None,
        host_link=_HOST,
        source="the row's own columns",
    )


def model_of(row: CsvRow) -> ModelSpec:
    """The row's model by name, or from its architecture columns where the name is not known.

    Raises :class:`UserError` with the nearest names when there are no such columns.
    """
    try:
        return catalog.model(row.text("model"))
    except UserError:
        if not all(row.has(c) for c in ("layers", "hidden", "heads")):
            raise
    return architecture(row)


def architecture(row: CsvRow) -> ModelSpec:
    """The model of columns ``family,gated,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,experts,experts_per_token``;
    what a family implies is filled in. Raises :class:`BadCell` for numbers that no model can have."""
    family = row.text("family", "llama").lower().replace("-", "_")
    hidden, heads = row.count("hidden"), row.count("heads")
    gated = row.flag("gated", family not in _PLAIN)
    biased = family in _BIASED
    ffn = row.count("ffn", -(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden)
    experts, chosen = _EXPERTS.get(family, (0, 0))
    experts = row.count("experts", experts, least=0)
    try:
        return ModelSpec(
            name=row.text("model", "") or row.text("id", "") or f"{family}-{hidden}",
            family={"gpt": "gpt2"}.get(family, family),
            vocab_size=row.count("vocab", 51200 if biased else 32000),
            hidden_size=hidden,
            num_layers=row.count("layers", most=MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=row.count("kv_heads", heads),
            head_dim=row.count("head_dim", max(1, hidden // heads)),
            intermediate_size=ffn,
            max_positions=row.count("seq_len", 4096, most=MOST_TOKENS),
            norm="layernorm" if family in _PLAIN else "rmsnorm",
            norm_bias=family != "mpt",
            activation="relu" if family == "opt" else "gelu" if family in _PLAIN else "silu",
            gated=gated,
            position=_POSITION.get(family, "learned" if biased or family == "bert" else "rope"),
            qkv_bias=biased or family == "qwen2",
            out_bias=biased,
            mlp_bias=biased,
            tie_embeddings=family in _TIED,
            embedding_norm=family == "bloom",
            dropout=0.1 if family in ("gpt", "gpt2", "gpt3", "megatron", "opt") else 0.0,
            num_experts=experts,
            experts_per_token=row.count("experts_per_token", min(chosen or 1, experts), least=0),
        )
    except ValidationError as e:
        raise BadCell(f"not a possible model: {e.errors()[0]['msg']}") from None
