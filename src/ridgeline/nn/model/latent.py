"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads are computed from one latent per token, to which one rotated key that all heads share is
added; the two are all that is cached. Without a cache, or where it is empty, keys and values are expanded (equations
9-16). Otherwise the projections that would expand them are absorbed into the queries and into the output (its
appendix C): attention is then that of one key head, whose values are its keys.

Shapes: B batch, S queries, T keys, H heads, N + R their width (R of it rotated), V the values' width, L the latent's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ridgeline.nn.kernels.products import is_linear
from ridgeline.nn.model.attention import BACKENDS, LayerCache, SelfAttention
from ridgeline.nn.model.mask import Mask
from ridgeline.nn.model.norm import RMSNorm
from ridgeline.nn.model.rotary import Rope, rotate
from ridgeline.nn.parallel.collectives import local
from ridgeline.spec.model import ModelSpec

_EPS = 1e-6
"""Of the latents' norms, whatever the model's other norms have."""


class LatentAttention(SelfAttention):
    """Self-attention whose keys and values come from a low-rank latent."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.kv_lora_rank is not None
        h, rank = spec.hidden_size, spec.kv_lora_rank
        self.backend = BACKENDS["flash"]
        self.head_dim, self.rotated, self.rank = spec.head_dim, spec.rotated, rank
        self.value_dim = spec.context_size // spec.num_heads
        self.query_scale, self.interleaved = spec.query_scale, spec.rope_interleaved
        if spec.q_lora_rank is None:
            self.q_proj = nn.Linear(h, spec.q_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(h, spec.q_lora_rank, bias=spec.qkv_bias)
            self.q_a_norm = RMSNorm(spec.q_lora_rank, _EPS)
            self.q_b_proj = nn.Linear(spec.q_lora_rank, spec.q_size, bias=False)
        self.kv_a_proj = nn.Linear(h, rank + spec.rotated, bias=spec.qkv_bias)
        self.kv_a_norm = RMSNorm(rank, _EPS)
        each = spec.head_dim - spec.rotated + self.value_dim
        self.kv_b_proj = nn.Linear(rank, spec.num_heads * each, bias=False)
        self.o_proj = nn.Linear(spec.context_size, h, bias=spec.out_bias)
        self._kept: Tensor | None = None

    @property
    def entrances(self) -> tuple[str, ...]:
        """Projections that read the layer's input."""
        return ("q_a_proj" if hasattr(self, "q_a_proj") else "q_proj", "kv_a_proj")

    def inner_inputs(self) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
        """The normalized latents, from which queries, keys and values are computed."""
        sites = {"kv": ("kv_b_proj", lambda x: self.kv_a_norm(self.kv_a_proj(x)[..., : self.rank]))}
        return {"q": ("q_b_proj", self._query_latents), **sites} if hasattr(self, "q_a_proj") else sites

    def forward(self, x: Tensor, mask: Mask, rope: Rope | None = None, cache: LayerCache | None = None) -> Tensor:
        """``x`` [B, S, hidden] → [B, S, hidden]."""
        assert rope is not None
        batch, length, _ = x.shape
        own, q = self.queries(x, rope)
        latent, key = self.latents(x, rope)
        if cache is None:
            q = torch.cat((own, q), -1)
            out = self.backend.function(q, *self._expanded(latent, key), mask)
        else:
            stored = torch.cat((latent, key), -1).transpose(1, 2)
            out = self._cached(own, q, stored, mask, cache)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected

    def queries(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """The queries of ``x`` [B, S, hidden]: what is not rotated, [B, H, S, N], and what is, [B, H, S, R]."""
        q = self.q_b_proj(self._query_latents(x)) if hasattr(self, "q_a_proj") else self.q_proj(x)
        q = q.view(*x.shape[:2], -1, self.head_dim)
        own, turned = q.split((self.head_dim - self.rotated, self.rotated), -1)
        turned = rotate(turned, rope, self.interleaved)
        if self.query_scale != 1:
            own, turned = own * self.query_scale, turned * self.query_scale
        return own.transpose(1, 2), turned.transpose(1, 2)

    def _query_latents(self, x: Tensor) -> Tensor:
        latents: Tensor = self.q_a_norm(self.q_a_proj(x))
        return latents

    def latents(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Of ``x`` [B, S, hidden]: latents [B, S, 1, L] and rotated keys [B, S, 1, R]."""
        latent, key = self.kv_a_proj(x).split((self.rank, self.rotated), -1)
        return self.kv_a_norm(latent).unsqueeze(2), rotate(key.unsqueeze(2), rope, self.interleaved)

    def _expanded(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, S, N + R] and values [B, H, S, V] of latents [B, S, 1, L] and rotated keys [B, S, 1, R]."""
        split = (self.head_dim - self.rotated, self.value_dim)
        own, values = self.kv_b_proj(latent.squeeze(2)).unflatten(-1, (-1, sum(split))).split(split, -1)
        keys = torch.cat((own, key.expand(-1, -1, own.shape[2], -1)), -1)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _cached(self, own: Tensor, turned: Tensor, stored: Tensor, mask: Mask, cache: LayerCache) -> Tensor:
        """Attention to what is cached and ``stored`` [B, 1, S, L + R], which is added to it: [B, H, S, V]."""
        if cache.fresh:
            stored = cache.store(stored)
            latent, key = stored.transpose(1, 2).split((self.rank, self.rotated), -1)
            return cache.attend_own(self.backend, torch.cat((own, turned), -1), *self._expanded(latent, key), mask)
        up = self._up().to(own.dtype).view(own.shape[1], -1, self.rank)  # [H, N + V, L]
        keys, values = up.split((self.head_dim - self.rotated, self.value_dim), 1)
        # The backends divide scores by the root of the width that they see.
        scale = (stored.shape[-1] / self.head_dim) ** 0.5
        q = torch.cat((torch.matmul(own, keys), turned), -1) * scale
        out = cache.attend(self.backend, q, stored, stored, mask)[..., : self.rank]
        return torch.matmul(out, values.transpose(1, 2))

    def _up(self) -> Tensor:
        """The weight of ``kv_b_proj``, [H·(N + V), L]; where it is held in another form, its product with one."""
        if is_linear(self.kv_b_proj):
            return local(self.kv_b_proj.weight)
        if self._kept is not None:
            return self._kept
        one = torch.eye(self.rank, dtype=self.kv_a_norm.weight.dtype, device=self.kv_a_norm.weight.device)
        product: Tensor = self.kv_b_proj(one).t()
        if not any(p.requires_grad for p in self.kv_b_proj.parameters()):
            self._kept = product
        return product
