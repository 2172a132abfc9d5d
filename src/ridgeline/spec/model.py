"""ModelSpec: the architecture numbers of a transformer, and its exact parameter list.

Pure data. :meth:`ModelSpec.parameters` enumerates every parameter tensor under the names that the torch twin
(:mod:`ridgeline.nn`) uses, so that the analytic side, the real side and published counts can be compared exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer, model_validator

from ridgeline.spec import parameter_list
from ridgeline.spec.errors import UserError, unknown
from ridgeline.spec.parameter_list import Parameter
from ridgeline.spec.rope import RopeScaling
from ridgeline.spec.unsupported import refuse

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swigluoai"]
Position = Literal["rope", "learned", "relative", "alibi"]
Head = Literal["lm", "mlm", "classify", "project"]


_SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
          "max_positions", "moe_every", "window_every")  # fmt: skip

_POSITIVE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
             "attention_soft_cap", "logits_soft_cap", "local_rope_theta", "kv_lora_rank", "q_lora_rank", "value_dim",
             "dense_intermediate_size", "router_scale", "query_temperature", "query_temperature_every",
             "expert_capacity")  # fmt: skip
"""Numbers that are None or positive."""
_LATER = frozenset((
    *_POSITIVE, "rotary_dim", "norm_offset", "input_norms", "output_norms", "parallel_residual", "shared_norm",
    "projection_size", "joint_qk_norm", "rope_interleaved", "dense_layers", "shared_intermediate_size", "router_scores",
    "router_score_bias", "router_groups", "router_groups_chosen", "router_on_input", "chunked_window", "nope_layers",
    "qk_norm_weight", "relative_distance", "start_token", "moe_first", "embedding_multiplier_rounded",
))  # fmt: skip
"""Fields that a dump leaves out at their defaults, so that the ids of experiments stored before them still hold."""

COLUMN = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
"""Linear layers whose outputs tensor parallelism divides (Megatron's column-parallel layers)."""
ROW = ("o_proj", "down_proj")
"""Linear layers whose inputs it divides, so that their outputs are partial sums."""
LATENT = ("q_a_proj", "q_a_norm", "kv_a_proj", "kv_a_norm")
"""Modules of multi-head latent attention before its heads, which every rank has whole."""
CAPPED_ROWS = 128
"""Queries whose scores exist at a time in attention that caps them; keys behind all of them are left out."""
FROZEN = (".score_bias",)
"""How the names of parameters end that no gradient trains."""


class ModelSpec(BaseModel):
    """Architecture of one model. Sizes are element counts; all fields are those of the published configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str = "custom"
    family: str
    """A ``model_type`` of Hugging Face's configurations: one of :data:`ridgeline.spec.families.FAMILIES`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    """Decoder layers (encoder layers for an encoder-only model)."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Inner width of the MLP (of one expert in a mixture-of-experts layer)."""
    dense_intermediate_size: int | None = None
    """Inner width of the MLP in a mixture's layers without experts (DeepSeek); None: that of an expert."""
    max_positions: int
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    """Whether a LayerNorm has a bias (MPT's have none)."""
    norm_offset: float = 0.0
    """Added to the weights of all norms (Gemma: 1)."""
    input_norms: bool = True
    """Whether what each sub-layer reads is normalized (OLMo 2: no)."""
    output_norms: bool = False
    """Whether what each sub-layer adds to the residual stream is normalized (Gemma 2, OLMo 2)."""
    dropout: float = 0.0
    """Dropout rate on attention probabilities and on the output of each sub-layer (spec only)."""
    activation: Activation = "silu"
    gated: bool = True
    """Whether the MLP has a gate projection (SwiGLU and similar)."""
    position: Position = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    """Leading dimensions of each head that are rotated (GPT-NeoX: a quarter); None: all. In latent attention, the last
    ones, and the keys' are the same for all heads."""
    rope_interleaved: bool = False
    """Whether neighboring dimensions are rotated together, as DeepSeek's, instead of those half the width apart."""
    local_rope_theta: float | None = None
    """Base of the unscaled rotary embedding in layers with a sliding window (Gemma 3); None: theirs is that of all."""
    position_offset: int = 0
    """Rows of the learned position table before position 0 (OPT: 2)."""
    relative_buckets: int = 0
    """Rows of the tables that relative positions add to the scores from (T5); see ``relative_distance``."""
    relative_distance: int = 128
    """Distance from which all are in the last of them."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys (Qwen3)."""
    joint_qk_norm: bool = False
    """Whether these norms are over all heads together (OLMo 2)."""
    qk_norm_weight: bool = True
    """Whether these norms have weights. Those without are in rotated layers only (Llama 4)."""
    kv_lora_rank: int | None = None
    """Width of the latent that keys and values are computed from in multi-head latent attention (DeepSeek-V2,
    arXiv:2405.04434, section 2.1); None: other attention."""
    q_lora_rank: int | None = None
    """Width of the latent that its queries are computed from; None: directly from the hidden states."""
    value_dim: int | None = None
    """Width of each value head there; None: head_dim."""
    tie_embeddings: bool = False
    causal: bool = True
    post_norm: bool = False
    """Normalize after each residual addition instead of before each sub-layer (BERT)."""
    parallel_residual: bool = False
    """Whether attention and MLP read the same residual stream, and both are added to it (GPT-NeoX, Falcon)."""
    shared_norm: bool = False
    """Whether both read it through one norm (Falcon 7B)."""
    token_types: int = 0
    embedding_norm: bool = False
    final_norm: bool = True
    head: Head = "lm"
    """The head on the last hidden states: "lm", "mlm" (BERT's masked tokens), "classify" (BERT's pooler and a
    classifier over the first token's), or "project" (each token's to a vector that texts are compared by; ColBERT,
    arXiv:2004.12832)."""
    num_labels: int = 0
    """Classes of a "classify" head."""
    projection_size: int = 0
    """Width of the vectors of a "project" head."""
    sliding_window: int | None = None
    window_every: int = 1
    """With a sliding window: every N-th layer attends to everything nevertheless (Gemma 2, gpt-oss: layers 1, 3, 5, …;
    Gemma 3: every sixth); 1: none does."""
    chunked_window: bool = False
    """Whether windows are chunks: a token attends to those of its own chunk of ``sliding_window`` positions (Llama
    4)."""
    nope_layers: bool = False
    """Whether the layers that attend to everything, where others have a window, have no rotary embedding (NoPE; Llama
    4)."""
    query_temperature: float | None = None
    """In these layers the query at position p is multiplied by 1 + query_temperature · log(1 + ⌊(p + 1) /
    query_temperature_every⌋) (arXiv:2501.19399; Llama 4); None: by 1."""
    query_temperature_every: int | None = None
    attention_sinks: bool = False
    """One learned logit per head that absorbs attention (gpt-oss's sinks)."""
    attention_soft_cap: float | None = None
    """Attention scores s become cap · tanh(s / cap) (Gemma 2)."""
    num_experts: int = 0
    experts_per_token: int = 0
    normalize_router: bool = True
    """Whether the chosen experts' weights are renormalized to sum to one (Mixtral)."""
    moe_bias: bool = False
    """Biases on the router and on every expert (gpt-oss)."""
    moe_every: int = 1
    """Every N-th layer is a mixture (1: all; 2: layers 1, 3, 5, … as in Switch)."""
    moe_first: int | None = None
    """The first of them (Switch: layer 1); None: layer ``moe_every`` - 1."""
    dense_layers: int = 0
    """First layers that are none (DeepSeek)."""
    shared_intermediate_size: int = 0
    """Inner width of an MLP beside the experts, which all tokens pass (DeepSeek's shared experts); 0: there is none."""
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits (DeepSeek-V3: sigmoid)."""
    router_score_bias: bool = False
    """One number per expert that is added to its score when experts are chosen, not when they are weighted, and that no
    gradient trains (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
    router_groups: int = 1
    """Equal groups of experts, of which ``router_groups_chosen`` can be chosen from: those with the highest score, or
    with a score bias those with the highest sum of two."""
    router_groups_chosen: int = 1
    router_scale: float | None = None
    """Multiplies the chosen experts' weights (DeepSeek); None: 1."""
    expert_capacity: int | None = None
    """Tokens of a sequence that an expert takes in one pass; later ones are added nothing (Switch); None: all."""
    router_on_input: bool = False
    """Whether a token is weighted before its experts instead of their outputs (Llama 4)."""
    encoder_layers: int = 0
    """Layers of the encoder in an encoder-decoder model."""
    start_token: int = 0
    """Token that its decoder begins with."""
    embedding_multiplier: float | None = None
    """Multiplies the embeddings (Granite); None: 1."""
    embedding_multiplier_rounded: bool = False
    """Whether it is rounded to the dtype of the weights first (Gemma)."""
    attention_multiplier: float | None = None
    """Multiplies the attention scores (Granite); None: 1 / sqrt(head_dim)."""
    residual_multiplier: float | None = None
    """Multiplies what each sub-layer adds to the residual stream (Granite); None: 1."""
    logits_scaling: float | None = None
    """Divides the logits (Granite); None: 1."""
    logits_soft_cap: float | None = None
    """Logits s become cap · tanh(s / cap) (Gemma 2)."""
    published_parameters: float | None = None
    """Parameter count that the model's authors publish, for the catalog's own check."""
    source: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        for field in _SIZES:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} is not at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if (self.head == "classify") != (self.num_labels > 0):
            raise ValueError(f"head {self.head!r} does not go with {self.num_labels} labels")
        if (self.head == "project") != (self.projection_size > 0):
            raise ValueError(f"head {self.head!r} does not go with projection_size {self.projection_size}")
        if self.head in ("classify", "project") and self.tie_embeddings:
            raise ValueError(f"a head {self.head!r} has nothing to tie to the embeddings")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout {self.dropout} is not in [0, 1)")
        for field in _POSITIVE:
            if (value := getattr(self, field)) is not None and value <= 0:
                raise ValueError(f"{field} {value} is not positive")
        rotated = self.rotated
        if self.rope_interleaved and not self.is_latent and self.rotary_dim is not None:
            raise ValueError("rope_interleaved does not go with rotary_dim")
        if self.position == "rope" and (not 0 < rotated <= self.head_dim or rotated % 2):
            raise ValueError(f"rotary_dim {rotated} is not an even number up to head_dim {self.head_dim}")
        factors = self.rope_scaling.short_factor if self.rope_scaling else ()
        if factors and 2 * len(factors) != rotated:
            raise ValueError(f"{len(factors)} longrope factors are not half of {rotated} rotated dimensions")
        if self.shared_norm and not self.parallel_residual:
            raise ValueError("shared_norm needs parallel_residual")
        if self.post_norm and (self.parallel_residual or self.output_norms or not self.input_norms):
            raise ValueError("post_norm does not go with another place of the norms or of the residual additions")
        if self.num_experts and (self.output_norms or self.parallel_residual):
            raise ValueError("a mixture of experts does not go with output_norms or parallel_residual")
        if self.activation == "swigluoai" and not self.gated:
            raise ValueError("swigluoai is a gated activation")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} is not between 1 and {self.num_experts}")
        if (self.position == "relative") != self.is_encoder_decoder:
            raise ValueError("relative positions are those of encoder-decoders, and they have no others")
        if self.expert_capacity is not None and self.experts_per_token != 1:
            raise ValueError("expert_capacity needs experts_per_token = 1")
        self._check_layers()
        self._check_latent()
        self._check_router()
        return self

    def _check_layers(self) -> None:
        if self.chunked_window and self.sliding_window is None:
            raise ValueError("chunked_window needs a sliding_window")
        if self.nope_layers and (self.sliding_window is None or self.window_every == 1 or self.position != "rope"):
            raise ValueError("nope_layers needs rotary embedding, and windows in all layers but every N-th")
        if self.query_temperature is not None and not (self.nope_layers and self.query_temperature_every):
            raise ValueError("query_temperature needs nope_layers and query_temperature_every")
        if not self.qk_norm_weight and (not self.qk_norm or self.joint_qk_norm or self.norm_offset):
            raise ValueError("qk_norm_weight = false needs qk_norm over each head")

    def _check_latent(self) -> None:
        if self.kv_lora_rank is None:
            if self.q_lora_rank is not None or self.value_dim is not None:
                raise ValueError("q_lora_rank and value_dim need kv_lora_rank")
            return
        other = [name for name, has in (
            ("sliding_window", self.sliding_window), ("qk_norm", self.qk_norm), ("post_norm", self.post_norm),
            ("attention_sinks", self.attention_sinks), ("attention_soft_cap", self.attention_soft_cap),
            ("position", self.position != "rope"), ("norm", self.norm != "rmsnorm")) if has]  # fmt: skip
        if other:
            raise ValueError(f"kv_lora_rank (latent attention) does not go with this {other[0]}")
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"latent attention with {self.num_kv_heads} key heads for {self.num_heads} heads")
        if self.rotary_dim is None or self.rotary_dim >= self.head_dim:
            raise ValueError("latent attention needs a rotary_dim below head_dim")

    def _check_router(self) -> None:
        groups, chosen = self.router_groups, self.router_groups_chosen
        if (groups, chosen) == (1, 1):
            return
        if not self.num_experts or self.num_experts % groups or not 1 <= chosen <= groups:
            raise ValueError(f"{chosen} of {groups} groups cannot be chosen among {self.num_experts} experts")
        if self.experts_per_token > chosen * (self.num_experts // groups):
            raise ValueError(f"{chosen} of {groups} groups hold fewer than {self.experts_per_token} experts")

    @model_serializer(mode="wrap")
    def _dump(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        default = type(self).model_fields
        return {k: v for k, v in fields.items() if k not in _LATER or getattr(self, k) != default[k].default}

    def changed(self, **fields: Any) -> ModelSpec:
        """A validated copy with other values in some fields. (``model_copy`` would keep derived counts too.)"""
        return type(self)(**{**self.model_dump(), **fields})

    # ---- derived sizes ------------------------------------------------------------------------------------------

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank is not None

    @property
    def context_size(self) -> int:
        """Width of what the output projection reads."""
        return self.num_heads * (self.head_dim if self.value_dim is None else self.value_dim)

    @property
    def cached_heads(self) -> int:
        """Heads of the key/value cache."""
        return 1 if self.is_latent else self.num_kv_heads

    @property
    def cached_dim(self) -> int:
        """Width of a head in the key/value cache; latent attention keeps a token's latent and its rotated key."""
        return self.head_dim if self.kv_lora_rank is None else self.kv_lora_rank + self.rotated

    @property
    def cached_tensors(self) -> int:
        """Tensors of ``cached_heads`` times ``cached_dim`` elements that a layer keeps of a token: keys and values, or
        one latent."""
        return 1 if self.is_latent else 2

    @property
    def dense_size(self) -> int:
        """Inner width of the MLP in layers without experts."""
        return self.dense_intermediate_size or self.intermediate_size

    @property
    def rotated(self) -> int:
        """Dimensions of each head that rotary embedding rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_changes(self) -> tuple[str, ...]:
        """What attention does to its scores beside masking them, which not every implementation can."""
        return tuple(name for name, has in (
            ("ALiBi", self.position == "alibi"), ("soft caps on scores", self.attention_soft_cap is not None),
            ("attention sinks", self.attention_sinks)) if has)  # fmt: skip

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before an attention that divides its scores by sqrt(head_dim)."""
        given = self.attention_multiplier
        return 1.0 if given is None else given * self.head_dim**0.5

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder beside its decoder (T5, Switch)."""
        return self.encoder_layers > 0

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer ``index`` is a mixture of experts."""
        if index < self.dense_layers:
            return False
        first = self.moe_every - 1 if self.moe_first is None else self.moe_first
        return bool(self.num_experts) and index % self.moe_every == first % self.moe_every

    def is_windowed_layer(self, index: int) -> bool:
        """Whether layer ``index`` attends to at most ``sliding_window`` tokens."""
        return self.sliding_window is not None and (self.window_every == 1 or (index + 1) % self.window_every != 0)

    def is_rotated_layer(self, index: int) -> bool:
        """Whether layer ``index`` has rotary embedding."""
        return self.position == "rope" and (not self.nope_layers or self.is_windowed_layer(index))

    def has_qk_norm(self, index: int) -> bool:
        """Whether layer ``index`` normalizes queries and keys."""
        return self.qk_norm and (self.qk_norm_weight or self.is_rotated_layer(index))

    def layer_kind(self, index: int) -> tuple[bool, bool]:
        """Layers of one kind are alike: whether it is a mixture, and whether it has a window that others have not."""
        return self.is_moe_layer(index), self.window_every > 1 and self.is_windowed_layer(index)

    def layer_kinds(self, count: int) -> list[tuple[bool, bool]]:
        """:meth:`layer_kind` of each of the first ``count`` layers."""
        if not self.num_experts and self.window_every <= 1:
            return [(False, False)] * count
        return [self.layer_kind(i) for i in range(count)]

    @property
    def windowed_layers(self) -> int:
        """Layers whose attention sees at most ``sliding_window`` tokens."""
        return sum(self.is_windowed_layer(i) for i in range(self.num_layers))

    @cached_property
    def num_parameters(self) -> int:
        """Exact number of parameters, tied tensors counted once."""
        return sum(p.numel for p in self.parameters())

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts it is not routed to."""
        total = 0
        for p in self.parameters():
            n = p.numel
            if ".experts." in p.name:
                n = n * self.experts_per_token // self.num_experts
            total += n
        return total

    # ---- the parameter list -------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter tensor in model order, named as in the torch twin; a tied head is not repeated."""
        return parameter_list.parameters(self)

    def block_parameters(self, index: int, stack: str = "layers") -> Iterator[Parameter]:
        """The parameters of one transformer block of ``stack`` ("layers" or "encoder")."""
        return parameter_list.of_block(self, index, stack)

    # ---- from Hugging Face --------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: dict[str, Any], name: str = "") -> ModelSpec:
        """Read a Hugging Face ``config.json`` (as a dict).

        Raises :class:`UserError` for an unsupported ``model_type`` or a missing key.
        """
        from ridgeline.spec.families import ALIASES, FAMILIES

        kind = str(config.get("model_type", ""))
        kind = ALIASES.get(kind, kind)
        if kind not in FAMILIES:
            raise refuse(kind) or unknown("model_type", kind, FAMILIES, "config.json")
        try:
            return cls(**{"name": name or kind, **FAMILIES[kind].read(config)})
        except KeyError as e:
            raise UserError(f"config.json of model_type {kind!r} has no key {e.args[0]!r}", "add it") from None
        except ValueError as e:
            raise UserError(f"config.json of model_type {kind!r} is not usable: {_first_line(e)}") from None
        except (TypeError, ArithmeticError, AttributeError) as e:  # a size that is a string, null, or zero
            raise UserError(f"config.json of model_type {kind!r} holds a value of the wrong kind: {e}") from None

    @classmethod
    def from_path(cls, path: Path) -> ModelSpec:
        """Read a ``config.json`` file, or the one inside a checkpoint directory."""
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"no config.json at {path}", "give a Hugging Face config.json or a checkpoint directory")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            fix = "give a catalog model's name (`ridgeline models`), a config.json or a directory that has one"
            raise UserError(f"{file} is no model: it is not valid JSON: {e}", fix) from None
        if not isinstance(config, dict):
            raise UserError(f"{file} does not hold a JSON object", "give a Hugging Face config.json")
        if path.is_dir():
            from ridgeline.spec.families.bert import with_projection

            config = with_projection(config, path)
        return cls.from_config(config, name=path.stem if path.is_dir() else path.parent.name or path.stem)


def _first_line(error: ValueError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[1:3]) if len(lines) > 2 else (lines[0] if lines else "invalid")
