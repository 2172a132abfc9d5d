"""A mixture's experts stored off the device, with a cache and prefetching for the next layer (arXiv:2312.17238)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.memory.expert_cache import ExpertCache, Policy
from ridgeline.nn.memory.layer_stream import LayerTensor, Source, layer_tensors, size_of
from ridgeline.nn.memory.meter import return_freed_memory
from ridgeline.nn.memory.tiered_store import PAGE
from ridgeline.nn.model.moe import Experts, MoE
from ridgeline.nn.quant.packed_model import BIASES, Dense, PackedExperts
from ridgeline.runtime.build import Build
from ridgeline.runtime.resting_weights import RestingWeights


def offload_experts(
    run: Build, folder: Path | None, keep: int, staging: int, policy: Policy, guesses: int
) -> ExpertCache:
    """Move all experts to host memory, or to disk if ``folder`` is given; each layer caches ``keep`` of them on the
    device, and prefetches ``guesses`` experts per token for the next layer."""
    named = {name: block.mlp for name, block in run.model.layers.items() if isinstance(block.mlp, MoE)}
    elements = {name: sum(p.numel() for p in moe.experts.parameters()) for name, moe in named.items()}
    groups: list[list[list[LayerTensor]]] = []
    sources: list[list[Source]] = []
    rest: RestingWeights | None = None
    for name, moe in named.items():  # one layer's are read at a time, where loading left that for later
        run.model.complete(name)
        if isinstance(moe.experts, Experts):
            moe.experts = _one_by_one(moe.experts)  # type: ignore[assignment]
        held: PackedExperts = moe.experts  # type: ignore[assignment]
        experts = [layer_tensors(nn.ModuleDict(held.modules_of(e))) for e in range(len(held.up_proj))]
        if rest is None:
            share = sum(elements.values()) / max(1, elements[name])
            rest = RestingWeights(run, folder, round(share * sum(size_of(t) + PAGE for t in experts)))
        sources.append([
            rest.put(t, [(f"layers.{name}.mlp.experts.{x.name.partition('.')[0]}", e) for x in t])
            for e, t in enumerate(experts)
        ])  # fmt: skip
        groups.append(experts)
        return_freed_memory()
    cache = ExpertCache(groups, sources, run.device, keep, staging, policy)
    run.buffers += [b.buffer for b in cache.buffers]
    modules = list(named.values())
    for i, moe in enumerate(modules):
        moe.run = partial(_run, cache, i)
        if guesses and i + 1 < len(modules):
            moe.register_forward_pre_hook(partial(_guess, cache, i + 1, modules[i + 1], guesses))
    run.metrics["expert_hit_share"] = lambda: cache.hits / max(1, cache.uses)
    run.metrics["expert_guess_recall"] = lambda: cache.guessed / max(1, cache.uses - cache.hits)
    return cache


def _one_by_one(stacked: Experts) -> PackedExperts:
    """The same experts with each projection as a separate module."""

    def linears(weight: Tensor) -> list[nn.Module]:
        return [Dense(w) for w in weight.detach().unbind()]

    gate = None if stacked.gate_proj is None else linears(stacked.gate_proj)
    biases = {name: getattr(stacked, name) for name in BIASES}
    return PackedExperts(stacked.activation, gate, linears(stacked.up_proj), linears(stacked.down_proj), biases)


def _run(cache: ExpertCache, layer: int, experts: Any, rows: Tensor, counts: list[int]) -> Tensor:
    """``rows`` [n, h] sorted by expert, ``counts[e]`` of them for expert e → [n, h] in the same order."""
    parts, found = torch.split(rows, counts), dict[int, Tensor]()
    for e in cache.use(layer, [e for e, n in enumerate(counts) if n]):
        found[e] = experts.one(e, parts[e])
    return torch.cat([rows[:0], *(found[e] for e in sorted(found))])


def _guess(cache: ExpertCache, layer: int, following: MoE, most: int, _: nn.Module, args: tuple[Any, ...]) -> None:
    """The experts to which the next layer's router would send the most tokens, given this layer's input."""
    tokens = args[0].reshape(-1, args[0].shape[-1])
    chosen = following.router(tokens).topk(most, dim=-1).indices.flatten()
    counts = chosen.bincount(minlength=following.num_experts)
    order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
    cache.guess(layer, order.tolist())
