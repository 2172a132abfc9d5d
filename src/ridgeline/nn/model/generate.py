"""Generation with a contiguous key/value cache: prefill, decode, and the loop around them."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.nn.model.attention import LayerCache
from ridgeline.nn.model.transformer import Transformer
from ridgeline.spec.errors import UserError

Cache = dict[str, LayerCache]


def make_cache(model: Transformer, batch: int, length: int, dtype: torch.dtype | None = None) -> Cache:
    """An empty cache for ``length`` positions of ``batch`` sequences, on the weights' device and in their dtype."""
    spec, weight = model.spec, next(model.parameters())
    shape = (batch, spec.cached_heads, length, spec.cached_dim)
    cache = {name: model.cache_of(shape, dtype or weight.dtype, weight.device) for name in model.layers}
    if spec.is_latent:
        for layer in cache.values():
            layer.share()
    return cache


def prefill(model: Transformer, input_ids: Tensor, cache: Cache, source: Tensor | None = None) -> Tensor:
    """Read a prompt [B, S] into the cache → logits of the next token, [B, V]. ``source`` [B, T]: what an encoder reads
    first."""
    if model.head is None:
        raise UserError("a model without a head cannot generate", "generate with the whole model")
    # Only the last position predicts anything: the head is not run on the others.
    logits: Tensor = model.head(model(input_ids, cache=cache, return_hidden=True, source=source)[:, -1])
    return logits


def decode(model: Transformer, tokens: Tensor, cache: Cache) -> Tensor:
    """One step: the newest token of every sequence, [B] → logits of the next, [B, V]."""
    return prefill(model, tokens[:, None], cache)


def opening(model: Transformer, prompts: Tensor) -> tuple[Tensor, Tensor | None]:
    """What :func:`prefill` reads of ``prompts`` [B, S] first: themselves, or an encoder-decoder's start token with the
    prompts as its source."""
    if not model.spec.is_encoder_decoder:
        return prompts, None
    return torch.full_like(prompts[:, :1], model.spec.start_token), prompts


@torch.inference_mode()
def generate(
    model: Transformer,
    input_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 0.0,
    eos: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue prompts [B, S] (unpadded) by up to ``max_new_tokens`` → [B, S + new].

    An encoder-decoder reads the prompts with its encoder, and its start token takes their place in the result.

    Greedy at temperature 0, else sampled from ``seed``. A sequence that has produced ``eos`` is filled up with it;
    generation ends when all have. Raises :class:`UserError` for a model that cannot generate, or too long a sequence.
    """
    spec = model.spec
    input_ids, source = opening(model, input_ids)
    batch, length = input_ids.shape
    if not spec.causal:
        raise UserError(f"family {spec.family!r} is an encoder and cannot generate", "use a decoder")
    if spec.position == "learned" and length + max_new_tokens > spec.max_positions:
        raise UserError(
            f"{length} prompt tokens and {max_new_tokens} new ones exceed the {spec.max_positions} learned positions",
            f"ask for at most {max(0, spec.max_positions - length)} new tokens",
        )
    cache: Cache = {}
    rng = torch.Generator(input_ids.device).manual_seed(seed)
    done = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    produced = [input_ids]
    for step in range(max_new_tokens):
        if step == 0 or (spec.rope_scaling is not None and spec.rope_scaling.outgrown(length + step)):
            cache = make_cache(model, batch, length + max_new_tokens)
            logits = prefill(model, torch.cat(produced, 1), cache, source)
        else:
            logits = decode(model, produced[-1][:, 0], cache)
        if temperature > 0:
            tokens = (logits.float() / temperature).softmax(-1).multinomial(1, generator=rng)[:, 0]
        else:
            tokens = logits.argmax(-1)
        if eos is not None:
            tokens = tokens.masked_fill(done, eos)
            done |= tokens == eos
        produced.append(tokens[:, None])
        if eos is not None and bool(done.all()):
            break
    return torch.cat(produced, 1)
