"""Whole decoder layers in one call of the compiled CPU kernels, for the newest token of each sequence.

Norms, projections, rotary embedding, the cache, attention, activation and residual additions of all layers run in one
team of threads (``decoder.cpp``; Deep-Fusion of DeepSpeed-Inference, arXiv:2207.00032).

Shapes: R rows (sequences), H hidden, G key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels import native
from ridgeline.nn.kernels.native import Layer, Linear, Norm, Pages, Step
from ridgeline.nn.model.attention import Attention, project
from ridgeline.nn.model.fused import add_norm, project_merged
from ridgeline.nn.model.mlp import MLP
from ridgeline.nn.model.norm import LayerNorm, RMSNorm
from ridgeline.nn.model.rotary import Rope
from ridgeline.nn.model.transformer import Transformer, TransformerBlock, add_then_norm
from ridgeline.nn.quant.native_codes import NativeCodes
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.spec.lowbit import FEW_ROWS
from ridgeline.spec.model import ModelSpec

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
DENSE_ROWS = 16
"""Rows up to which dense weights are read faster by our kernel than by a matrix product."""
_UNDERSTOOD = frozenset({
    "name", "family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "max_positions", "norm", "norm_eps", "activation", "gated", "position", "rope_theta",
    "rope_scaling", "position_offset", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "tie_embeddings", "final_norm",
    "head", "num_labels", "sliding_window", "token_types", "embedding_norm", "embedding_multiplier",
    "attention_multiplier", "residual_multiplier", "logits_scaling", "published_parameters", "source", "num_experts",
    "experts_per_token", "normalize_router", "moe_every", "dropout",
})  # fmt: skip
"""Fields of a model that the kernel implements, or that other parts of the model do."""


@dataclass
class Pool:
    """Where the keys and values of a step's sequences are."""

    keys: Sequence[Tensor]
    """Of each layer, [1, G, slots, D], or [R, G, slots, D] with a part of its own for each sequence."""
    values: Sequence[Tensor]
    table: Tensor
    """int32 [R, blocks]: the blocks of each sequence."""
    lengths: Tensor
    """int32 [R]: tokens of each sequence, the new one included."""
    slots: Tensor
    """int64 [R]: the new token's slot."""
    block: int
    """Slots of a block."""


class Decoder:
    """The layers of a model in the form that the kernel reads. It holds the weights that it points to."""

    def __init__(self, model: Transformer) -> None:
        """Raises :class:`ValueError`, with the reason, for a model that the kernel does not compute."""
        spec = model.spec
        _check(spec, model)
        self.spec = spec
        self._held: list[Tensor] = []
        blocks = list(model.layers.values())
        self.layers = (Layer * len(blocks))(*(self._layer(b, spec) for b in blocks))
        kinds = {int(p.kind) for layer in self.layers for p in _linears(layer)}
        self.most_rows = FEW_ROWS if 0 not in kinds else DENSE_ROWS
        """Rows up to which this is faster than operator by operator."""
        self._pointed: list[int] = []

    def __call__(self, x: Tensor, rope: Rope | None, pool: Pool) -> Tensor:
        """``x`` [R, H] through all layers → [R, H] of the same dtype; new keys and values go to the pool."""
        spec, rows = self.spec, x.shape[0]
        self._point(pool)
        stream = x.float() if x.dtype != torch.float32 else x.clone()
        d = spec.head_dim
        tables = [t.reshape(-1, d).float().expand(rows, -1).contiguous() for t in rope or ()]
        cosine, sine = [t.data_ptr() for t in tables] or (None, None)
        shape = pool.keys[0].shape
        slots = shape[2]
        pages = Pages(pool.table.data_ptr(), pool.lengths.data_ptr(), pool.table.shape[1], pool.block, slots,
                      slots * shape[1] if shape[0] > 1 else 0)  # fmt: skip
        step = Step(
            stream.data_ptr(), cosine, sine, pool.slots.data_ptr(), pages, rows, spec.hidden_size, spec.num_heads,
            spec.num_kv_heads, d, spec.intermediate_size,
            native.TYPES[pool.keys[0].dtype], _ACTIVATIONS[spec.activation],
            spec.query_scale * spec.head_dim**-0.5, spec.residual_multiplier or 1.0,
        )  # fmt: skip
        native.decode(step, self.layers)
        return stream.to(x.dtype)

    def _point(self, pool: Pool) -> None:
        """Tell the layers where their caches are, if that has changed."""
        now = [t.data_ptr() for t in (*pool.keys, *pool.values)]
        if now != self._pointed:
            half = len(pool.keys)
            for layer, keys, values in zip(self.layers, now[:half], now[half:], strict=True):
                layer.keys, layer.values = keys, values
            self._pointed = now

    def _layer(self, block: nn.Module, spec: ModelSpec) -> Layer:
        if type(block) is not TransformerBlock or block.add_norm not in (add_then_norm, add_norm):
            raise ValueError("a layer is wrapped or replaced")
        attention, mlp = block.attention, block.mlp
        plain = type(attention) is Attention and attention.project in (project, project_merged)
        if not plain or type(mlp) is not MLP:
            raise ValueError("a layer's attention or feed-forward part is replaced, or it has experts")
        for m in block.modules():
            if m._forward_hooks or m._forward_pre_hooks:
                raise ValueError("a layer has hooks")
        norms = [block.attention_norm, block.mlp_norm, attention.q_norm, attention.k_norm]
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj,
                   mlp.down_proj]  # fmt: skip
        return Layer(*map(self._norm, norms), *map(self._linear, linears), None, None, spec.sliding_window or 0)

    def _keep(self, t: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        if t is None:
            return None
        if t.device.type != "cpu" or type(t) not in (Tensor, nn.Parameter) or t.dtype not in _held_types():
            raise ValueError(f"a weight on {t.device} of {t.dtype} is not read by the kernel")
        t = t.detach() if dtype is None else t.detach().to(dtype)
        self._held.append(t := t.contiguous())
        return t.data_ptr()

    def _norm(self, module: nn.Module | None) -> Norm:
        if module is None:
            return Norm()
        if type(module) not in (RMSNorm, LayerNorm):
            raise ValueError("a norm is replaced")
        weight, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(weight, Tensor)
        eps = module.eps
        assert isinstance(eps, float)
        shift = self._keep(bias, weight.dtype)
        return Norm(self._keep(weight), shift, native.TYPES[weight.dtype], type(module) is LayerNorm, eps)

    def _linear(self, module: nn.Module | None) -> Linear:
        if module is None:
            return Linear()
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.dtype not in native.TYPES:
                raise ValueError(f"a weight of {weight.dtype} is not read by the kernel")
            out, width = weight.shape
            return Linear(0, self._keep(weight), None, None, self._keep(module.bias, torch.float32),
                          native.TYPES[weight.dtype], out, width, width)  # fmt: skip
        codes = module.codes if type(module) is PackedLinear else None
        if not isinstance(codes, NativeCodes) or not module.fast or module.input or module.aside is not None:
            raise ValueError(f"a {type(module).__name__} is not computed by the kernel")
        assert isinstance(module, PackedLinear)
        for t in (codes.codes, codes.scale, codes.zero, module.bias):
            self._keep(t)
        return codes.described(module.bias)


def find_decoder(model: Transformer) -> Decoder | None:
    """The model's layers as one kernel; None for one that the kernel does not compute."""
    try:
        return Decoder(model)
    except ValueError:
        return None


def _held_types() -> tuple[torch.dtype, ...]:
    return (*native.TYPES, torch.int8, torch.uint8)


def _linears(layer: Layer) -> list[Linear]:
    found = [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
    return [p for p in found if p.weight]


def _check(spec: ModelSpec, model: Transformer) -> None:
    if native.library() is None:
        raise ValueError("the compiled kernels are missing")
    other = [k for k, v in spec.model_dump(exclude_defaults=True).items() if k not in _UNDERSTOOD and v is not None]
    odd = [spec.post_norm, spec.window_every != 1, spec.num_experts > 0, not spec.causal, spec.position == "alibi"]
    if other or any(odd):
        raise ValueError(f"{', '.join(other) or 'its kind of layer'} is not in the kernel")
    if spec.activation not in _ACTIVATIONS:
        raise ValueError(f"activation {spec.activation!r} is not in the kernel")
