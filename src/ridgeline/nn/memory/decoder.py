"""Whole decoder layers in one call of the compiled CPU kernels, for the newest token of each sequence.

Norms, projections, rotary embedding, the cache, attention, activation and residual additions of all layers run in one
team of threads (``decoder.cpp``; Deep-Fusion of DeepSpeed-Inference, arXiv:2207.00032).

Shapes: R rows (sequences), H hidden, G key/value heads, D head dimension.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.nn.kernels import native
from ridgeline.nn.kernels.native import Cache, Layer, Linear, Norm, Pages, Step
from ridgeline.nn.kernels.products import is_linear
from ridgeline.nn.memory.cpu_paged_attention import described
from ridgeline.nn.memory.kv_pool import PagedCache, PlainStore, Singles
from ridgeline.nn.model.attention import Attention, LayerCache, project
from ridgeline.nn.model.fused import add_norm, project_merged
from ridgeline.nn.model.mlp import MLP
from ridgeline.nn.model.moe import Experts, MoE, run_here
from ridgeline.nn.model.norm import LayerNorm, RMSNorm
from ridgeline.nn.model.rotary import Rope
from ridgeline.nn.model.transformer import LMHead, Transformer, TransformerBlock, add_then_norm
from ridgeline.nn.quant.native_codes import NativeCodes
from ridgeline.nn.quant.packed_linear import PackedLinear
from ridgeline.nn.quant.packed_model import Dense, PackedExperts
from ridgeline.nn.quant.torch_codes import wide_dtype
from ridgeline.spec.decode_kernel import ACTIVATIONS, refusal
from ridgeline.spec.lowbit import FEW_ROWS
from ridgeline.spec.model import ModelSpec

DENSE_ROWS, UNITS_ROWS = 24, 8
"""Rows up to which dense weights are read faster by our kernel than by a matrix product; by matrix units for bf16."""


@dataclass
class Pool:
    """Where a model's keys and values are."""

    caches: list[tuple[Cache, Cache]]
    """Keys and values of each layer."""
    slots: int
    """Slots of a head."""
    sequence: int = 0
    """Slots between the sequences, where each has a part of its own; 0: all share the slots."""

    @classmethod
    def paged(cls, layers: Iterable[PagedCache]) -> Pool:
        """The pool of a serving engine."""
        stores = [layer.stores for layer in layers]
        rows = stores[0][0]
        held = rows.rows if isinstance(rows, PlainStore) else rows.codes
        return cls([(described(k), described(v)) for k, v in stores], held.shape[2])

    @classmethod
    def contiguous(cls, layers: Iterable[LayerCache]) -> Pool:
        """Caches [B, G, T, D] with a part for each sequence."""
        pairs = [(layer.keys, layer.values) for layer in layers]
        _, groups, slots, _ = pairs[0][0].shape
        caches = [tuple(Cache(t.data_ptr(), None, None, 0, native.TYPES[t.dtype]) for t in pair) for pair in pairs]
        return cls([(k, v) for k, v in caches], slots, slots * groups)


class Decoder:
    """The layers of a model in the form that the kernel reads. It holds the weights that it points to."""

    def __init__(self, model: Transformer) -> None:
        """Raises :class:`ValueError`, with the reason, for a model that the kernel does not compute."""
        spec = model.spec
        if native.library() is None or refusal(spec):
            raise ValueError(refusal(spec) or "the compiled kernels are missing")
        self.spec = spec
        self._held: list[Tensor] = []
        self._experts: list[ctypes.Array[Linear]] = []
        blocks = list(model.layers.values())
        self.layers = (Layer * len(blocks))(*(self._layer(b, spec) for b in blocks))
        dense = {int(p.type) for layer in self.layers for p in _linears(layer) if p.kind == 0}
        wide = dense - {native.TYPES[torch.float32]} and wide_dtype() is torch.bfloat16
        self.most_rows = FEW_ROWS if not dense else UNITS_ROWS if wide else DENSE_ROWS
        """Rows up to which this is faster than operator by operator."""
        self._pool: Pool | None = None
        self._head = model.head if type(model.head) is LMHead and is_linear(model.head.out) else None
        self._out = None if self._head is None else self._dense(self._head.out.weight, None)
        self._last = self._norm(model.norm)

    def norm(self, x: Tensor) -> Tensor | None:
        """The model's final norm of rows ``x`` [R, H], in their dtype; None where there is none, or of many rows."""
        if not self._last.weight or len(x) > DENSE_ROWS:
            return None
        rows = x.float().contiguous()
        y = torch.empty_like(rows)
        native.norm(self._last, rows, y)
        return y.to(x.dtype)

    def logits(self, x: Tensor) -> Tensor | None:
        """Logits [R, V] of rows ``x`` [R, H], in their dtype; None where the model's head is another, or as fast."""
        head, out = self._head, self._out
        if head is None or out is None or len(x) > DENSE_ROWS or native.TYPES.get(x.dtype) != out.type:
            return None
        y = x.new_empty(len(x), out.out)
        native.dense_linear(out, x.float().contiguous(), y)
        return head.scaled(y)

    def __call__(self, x: Tensor, rope: Rope | None, places: Tensor, pool: Pool, at: Singles, slots: Tensor) -> Tensor:
        """``x`` [R, H], the newest tokens of the sequences ``at``, through all layers → [R, H] of the same dtype. Their
        rows of the tables ``rope`` are ``places`` [R] int64, and new keys and values go to the ``slots`` [R] int64 of
        the pool."""
        spec, rows, d = self.spec, x.shape[0], self.spec.head_dim
        if pool is not self._pool:
            for layer, (keys, values) in zip(self.layers, pool.caches, strict=True):
                layer.keys, layer.values = keys, values
            self._pool = pool
        stream = x.float() if x.dtype != torch.float32 else x.clone()
        tables = [t.contiguous() for t in rope or ()]  # as they are made
        cosine, sine = [t.data_ptr() for t in tables] or (None, None)
        pages = Pages(
            at.table.data_ptr(), at.lengths.data_ptr(), at.table.shape[1], at.block, pool.slots, pool.sequence
        )
        step = Step(
            stream.data_ptr(), cosine, sine, places.data_ptr(), slots.data_ptr(), pages, rows, spec.hidden_size,
            spec.num_heads, spec.num_kv_heads, d, spec.intermediate_size, ACTIVATIONS.index(spec.activation),
            native.TYPES[tables[0].dtype] if tables else 0, spec.query_scale * d**-0.5,
            spec.residual_multiplier or 1.0,
        )  # fmt: skip
        native.decode(step, self.layers)
        return stream.to(x.dtype)

    def _layer(self, block: nn.Module, spec: ModelSpec) -> Layer:
        fused = getattr(block.add_norm, "func", block.add_norm)  # which may fold wide rows
        if type(block) is not TransformerBlock or fused not in (add_then_norm, add_norm):
            raise ValueError("a layer is wrapped or replaced")
        attention, mlp = block.attention, block.mlp
        if type(attention) is not Attention or attention.project not in (project, project_merged):
            raise ValueError("a layer's attention is replaced")
        for m in block.modules():
            if m._forward_hooks or m._forward_pre_hooks:
                raise ValueError("a layer has hooks")
        norms = [block.attention_norm, block.mlp_norm, attention.q_norm, attention.k_norm]
        heads = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        layer = Layer(*map(self._norm, norms), *map(self._linear, heads))
        layer.window = spec.sliding_window if block.windowed and spec.sliding_window else 0
        if type(mlp) is MLP:
            layer.gate, layer.up, layer.down = map(self._linear, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        elif type(mlp) is MoE and mlp.run is run_here:
            self._mixture(layer, mlp)
        else:
            raise ValueError("a layer's feed-forward part is replaced")
        return layer

    def _mixture(self, layer: Layer, mlp: MoE) -> None:
        """The router and the experts, of whom all have weights of one kind."""
        found: list[Linear] = []
        experts = mlp.experts
        if type(experts) is Experts and experts.linear is F.linear:
            stacks = (experts.gate_proj, experts.up_proj, experts.down_proj)
            found = [self._dense(None if t is None else t[e], None) for e in range(mlp.num_experts) for t in stacks]
        elif isinstance(experts, PackedExperts):
            lists = (experts.gate_proj, experts.up_proj, experts.down_proj)
            found = [self._linear(None if m is None else m[e]) for e in range(mlp.num_experts) for m in lists]
        kinds = {(t.kind, t.group if t.kind else 0, t.out, t.width) for t in found[1::3]}
        if len(kinds) != 1 or len({(t.kind, t.group) for t in found[2::3]}) != 1:
            raise ValueError("a mixture's experts are replaced, or of several kinds")
        layer.router = self._linear(mlp.router)
        array = (Linear * len(found))(*found)
        self._experts.append(array)
        layer.experts = ctypes.cast(array, ctypes.c_void_p)
        layer.gate, layer.up, layer.down = found[:3]
        layer.chosen, layer.normalized = mlp.k, mlp.normalize

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

    def _dense(self, weight: Tensor | None, bias: Tensor | None) -> Linear:
        if weight is None:
            return Linear()
        if weight.dtype not in native.TYPES or weight.dtype == torch.float64:
            raise ValueError(f"a weight of {weight.dtype} is not read by the kernel")
        out, width = weight.shape
        return Linear(0, self._keep(weight), None, None, self._keep(bias, torch.float32), native.TYPES[weight.dtype],
                      out, width, width)  # fmt: skip

    def _linear(self, module: nn.Module | None) -> Linear:
        if module is None:
            return Linear()
        if is_linear(module) or type(module) is Dense:
            return self._dense(module.weight, getattr(module, "bias", None))
        codes = module.codes if type(module) is PackedLinear else None
        if not isinstance(codes, NativeCodes) or not module.fast or module.input or module.aside is not None:
            raise ValueError(f"a {type(module).__name__} is not computed by the kernel")
        assert isinstance(module, PackedLinear)
        for t in (codes.codes, codes.scale, codes.zero):
            self._keep(t)
        described = codes.described(None)
        described.bias = self._keep(module.bias, torch.float32)
        return described


def find_decoder(model: Transformer) -> Decoder | None:
    """The model's layers as one kernel; None for one that the kernel does not compute."""
    try:
        return Decoder(model)
    except ValueError:
        return None


def _held_types() -> tuple[torch.dtype, ...]:
    return (*native.TYPES, torch.int8, torch.uint8)


def _linears(layer: Layer) -> list[Linear]:
    found = [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]  # the router is small
    return [p for p in found if p.weight]
