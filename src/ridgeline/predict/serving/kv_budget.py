"""Memory of a serving engine: what weights and workspace leave for the key/value cache, and the bytes per token."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.graph import Graph
from ridgeline.graph.graph import even
from ridgeline.predict.serving.engine_costs import EngineCosts
from ridgeline.predict.serving.iteration_time import Iterations
from ridgeline.predict.step.peak_memory import Peak
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.errors import UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.spec.scheduling import Scheduling
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import remaining_model, techniques_of

BLOCK = 16
"""Number of tokens per block of the cache; half of one per sequence is empty on average."""
WORKSPACE = 1.4
"""Bytes of the largest iteration, relative to its largest operator and the residual stream: the operators' own buffers
and the allocator's fragmentation. With it, an engine profiled for 64 prompts of 512 tokens of llama2-70b on two A100
has room for as few of them as was measured (open data, one configuration)."""
GRAPH_POOL = 1.0e9
"""Bytes of captured CUDA graphs and their static buffers (order of magnitude, vLLM's start-up log)."""

LESS = "use more devices (tensor_parallel), smaller weights (fp8, mxfp4) or kv_quant"
"""What gives a cache room."""


class Room(NamedTuple):
    """Cache capacity of one device."""

    tokens: int
    """Number of cached tokens that fit, over all sequences; 0 if the weights alone do not."""
    bytes_per_token: float
    peak: Peak
    reason: str
    """The calculation in words."""


def bytes_per_token(e: Experiment, stages: tuple[int, ...] = ()) -> float:
    """Bytes of keys and values of one token on one device, in a pipeline on one of the stage with the most layers
    (``stages``: of each, where they are not divided evenly); a layer with a sliding window keeps a bounded number, so
    it is not counted."""
    m = remaining_model(e)
    layers: float = max(stages or even(m.num_layers, e.parallel.get("pp", 1)))
    if m.window_every > 1:
        layers *= 1 - m.windowed_layers / m.num_layers
    dtype = next(filter(None, (t.cache_dtype for t in techniques_of(e.plan))), e.dtype)
    heads = max(1.0, m.cached_heads / e.parallel.get("tp", 1))  # fewer heads than ranks are replicated
    return m.cached_tensors * layers * heads * m.cached_dim * kv_bytes(dtype, m.cached_dim)


def room(e: Experiment, surface: Iterations, engine: EngineCosts, largest: int) -> Room:
    """Memory left for the cache. ``largest``: number of tokens of the largest iteration."""
    device = surface.cluster.device
    s = engine.scheduling(techniques_of(e.plan))
    weights = _weights(surface, s)
    tokens = min(largest, engine.max_num_batched_tokens)
    work = workspace(surface.graph(tokens, 1, 1)) + _scores(surface, tokens, s.limits.padded)
    pool = GRAPH_POOL if engine.graphs else 0.0
    usable = device.memory_bytes * engine.memory_share - device.reserved_bytes
    left = usable - weights - work - pool
    each = bytes_per_token(e, s.stages)
    peak = Peak(
        {"parameters": weights, "kv_cache": max(0.0, left), "activations": work, "buffers": pool},
        "the largest iteration",
    )
    tokens = max(0, int(left / each))
    reason = (
        f"the weights of {e.model.name} take {weights / 1e9:.1f} GB per device, with workspace"
        f" {(weights + work + pool) / 1e9:.1f} GB of the {usable / 1e9:.1f} GB that {engine.name} may use on"
        f" {device.name}: room for {tokens} cached tokens"
    )
    return Room(tokens, each, peak, reason)


def pool_room(surface: Iterations, s: Scheduling, w: Serve) -> tuple[Room, int, int]:
    """The pool of Ridgeline's own engine, its blocks, and the maximum length of prompt and output together; both are 0
    where the weights leave no room for it. All pipeline stages have as many blocks as the one with least room."""
    e, device = surface.e, surface.cluster.device
    tokens = s.limits.max_num_batched_tokens
    work = workspace(surface.graph(tokens, 1, 1))
    m = remaining_model(e)
    ranks, width = e.parallel.get("tp", 1), DTYPE_BYTES[e.dtype]
    pools, sizes = [], []
    for layers, weights in _stages(surface, s):
        each = s.block_bytes(m, layers, max(1.0, m.cached_heads / ranks), width)
        free = device.memory_bytes - device.reserved_bytes - weights - (work if w.kv_cache_share else 0.0)
        try:
            pools.append(s.pool(m, w, each, free, device.kind, width, ranks))
        except UserError as why:
            if w.kv_cache_bytes is not None:
                raise
            reason = f"beside the weights of {m.name}, {weights / 1e9:.1f} GB per device, {why.what}"
            peak = Peak({"parameters": weights, "activations": work}, "the largest iteration")
            return Room(0, each / s.block_size, peak, reason), 0, 0
        sizes.append((weights, each))
    blocks, longest = (min(found) for found in zip(*pools, strict=True))
    weights, each = max(sizes, key=lambda size: size[0] + blocks * size[1])
    held = blocks * each + s.draft_blocks(longest, blocks) * s.draft_block_bytes(width)
    work += s.score_bytes(m, longest, width, ranks)
    peak = Peak({"parameters": weights, "kv_cache": held, "activations": work}, "the largest iteration")
    reason = f"the pool has {blocks} blocks of {s.block_size} tokens, a request has room for {longest} tokens"
    return Room(blocks * s.block_size, each / s.block_size, peak, reason), blocks, longest


def _stages(surface: Iterations, s: Scheduling) -> list[tuple[int, float]]:
    """Layers of each pipeline stage, and bytes of its weights; the first one has the embedding and the head."""
    layers, whole = remaining_model(surface.e).num_layers, _weights(surface, s)
    counts = s.stages or even(layers, surface.e.parallel.get("pp", 1))
    held = {True: 0.0, False: 0.0}
    for b in surface.graph(1, 1, 1).blocks:
        held[b.is_layer] += sum(p.stored_bytes * p.resident * b.repeat for p in b.params)
    each, beside = held[True] * len(counts) / layers, whole - held[True]
    return [(n, each * n + beside - (held[False] if i else 0.0)) for i, n in enumerate(counts)]


def _weights(surface: Iterations, s: Scheduling) -> float:
    """Bytes of the weights on a device, of what drafts too."""
    return surface.graph(1, 1, 1).resident_bytes + s.beside_parameters * DTYPE_BYTES[surface.e.dtype]


def _scores(surface: Iterations, tokens: int, together: bool) -> float:
    """Bytes of the score matrices of the longest prompt in an iteration of ``tokens`` tokens, or of all its prompts
    ``together``; 0 where attention is fused."""
    if not any(o.name == "attention.scores" for b in surface.graph(1, 1, 1).blocks for o in b.forward):
        return 0.0
    longest = surface.contexts[1]
    g = surface.graph(max(1, tokens // longest) if together else 1, min(tokens, longest), longest)
    return max(b.workspace for b in g.blocks if not b.is_head)


def workspace(g: Graph) -> float:
    """Bytes of the largest layer's temporaries and the residual stream. The head computes the last token of each
    sequence alone, not every token of the iteration."""
    ops = [o for b in g.blocks if not b.is_head for o in b.forward]
    largest = max((o.bytes for o in ops if o.kind == "activation"), default=0.0)
    stream = max((o.bytes for o in ops if o.kind == "residual"), default=0.0)
    return WORKSPACE * (largest + stream)
