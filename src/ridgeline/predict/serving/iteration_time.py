"""Iteration time of a serving engine, fast enough for millions of iterations: tables over the operator model.

An iteration computes ``tokens`` rows in every linear layer, attention of each prompt chunk and of the decoding batch,
and one row of logits per sequence. Each part is timed by the operator model on a sparse grid, when first needed, and
interpolated linearly in between. Decode attention is linear in the cached tokens, so a run of decode iterations has a
closed form.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from ridgeline.graph import Graph, Op, tokens_graph
from ridgeline.predict.common import rewritten
from ridgeline.predict.operators.collective_time import collective_time
from ridgeline.predict.operators.kernel import op_time
from ridgeline.predict.serving.engine_costs import FEW_ROWS, EngineCosts
from ridgeline.predict.serving.engine_fusions import fuse
from ridgeline.predict.serving.weight_transfers import weight_transfers
from ridgeline.spec.device import DTYPE_BYTES, Cluster, Device
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import FLOAT8_ROWS, MANY_ROWS
from ridgeline.spec.plan import Plan
from ridgeline.spec.scheduling import (
    CAPTURED_SEQUENCES,
    OWN,
    Speculation,
    captured_prompts,
    captured_tokens,
    captures,
    divides_far_keys,
)
from ridgeline.spec.workload import Serve
from ridgeline.techniques.registry import as_in_engines, remaining_model
from ridgeline.techniques.technique import SchedulingTechnique, Technique

GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
        12288, 16384, 32768, 65536, 131072)  # fmt: skip
ATTENTION = ("attention", "bmm", "softmax", "mask")


@dataclass
class Interpolated:
    """A function of a count, evaluated on ``GRID`` when first needed and interpolated linearly."""

    exact: Callable[[int], float]
    known: dict[int, float] = field(default_factory=dict)

    def __call__(self, x: int) -> float:
        """The value at ``x`` ≥ 1."""
        value = self.known.get(x)
        if value is None:
            value = self.known[x] = self._between(x)
        return value

    def _node(self, x: int) -> float:
        if x not in self.known:
            self.known[x] = self.exact(x)
        return self.known[x]

    def _between(self, x: int) -> float:
        i = bisect_right(GRID, x)
        if i == len(GRID) or GRID[i - 1] == x:
            return self.exact(x)
        low, high = GRID[i - 1], GRID[i]
        a, b = self._node(low), self._node(high)
        return a + (b - a) * (x - low) / (high - low)


class Parts:
    """The operators' times of one model, plan and engine, which do not depend on the requests' lengths.

    Attributes are tables over the tokens of an iteration: ``body`` (all layers except attention), ``head`` (over
    sequences), ``links`` (collectives of the body), ``expanding`` (what a prompt's products of quantized weights take
    longer for expanding them), ``beside`` and ``before`` (:class:`Transfers` of weights stored off the device), in
    seconds.
    """

    def __init__(self, e: Experiment, techniques: list[Technique], cluster: Cluster, engine: EngineCosts) -> None:
        self.e, self.cluster, self.engine = e, cluster, engine
        self.techniques = as_in_engines(techniques) if engine.flash else techniques
        fused = any("fused_attention" in t.parts for t in self.techniques)
        self.alone = engine.name == OWN and not fused
        """Whether each sequence's attention is computed by itself, as our engine does score matrices."""
        self.bounded = not fused and cluster.device.kind == "gpu" and not engine.gap_s
        """Whether score matrices take at least the time of the fused kernel: the small kernels of few queries are timed
        by what they move, without the latencies that the fused one was fitted with, unless the engine's gaps between
        kernels have them."""
        self._graphs: dict[int, Graph] = {}
        self._attended: dict[tuple[int, int, int], float] = {}
        self.body = Interpolated(lambda t: self.total(self.graph(t, 1, 1), attention=False, head=False))
        self.head = Interpolated(lambda t: self.total(self.graph(t, 1, 1), attention=False, head=True))
        self.links = Interpolated(lambda t: self._links(self.graph(t, 1, 1)))
        self.expanding = Interpolated(lambda t: self._expanding(self.graph(t, 1, 1)))
        self.beside = Interpolated(lambda t: weight_transfers(self.graph(t, 1, 1), cluster).beside)
        self.before = Interpolated(lambda t: weight_transfers(self.graph(t, 1, 1), cluster).before)
        blocks = self.graph(1, 1, 1).blocks
        self.dispatch_s = engine.dispatch_s * sum(b.repeat * len(b.forward) for b in blocks)
        scores = sum(b.repeat * sum(_attends(o) for o in b.forward) for b in blocks)
        self.sequence_s = engine.dispatch_s * scores if self.alone else 0.0
        """Host seconds to issue the operators of one more sequence's attention."""

    def graph(self, batch: int, q_len: int, kv_len: int) -> Graph:
        """The rewritten, fused graph of ``batch`` sequences over their last ``q_len`` of ``kv_len`` tokens;
        read-only."""
        alone = q_len == kv_len == 1
        if alone and batch in self._graphs:
            return self._graphs[batch]
        g = tokens_graph(self.e.model, batch, q_len, kv_len, self.e.dtype)
        g = fuse(rewritten(g, self.e, self.techniques), self.engine, self.e.model)
        if alone and len(self._graphs) < 2 * len(GRID):
            self._graphs[batch] = g
        return g

    def attention(self, batch: int, q_len: int, kv_len: int) -> float:
        """Attention seconds of ``batch`` sequences over their last ``q_len`` of ``kv_len`` tokens."""
        each, times = (1, batch) if self.alone else (batch, 1)
        key = (each, q_len, kv_len)
        if key not in self._attended:
            self._attended[key] = self.total(self.graph(*key), attention=True)
            if self.bounded:
                self._attended[key] = max(self._attended[key], self.total(self._fused(*key), attention=True))
        return times * self._attended[key]

    def _fused(self, batch: int, q_len: int, kv_len: int) -> Graph:
        """:meth:`graph` with fused attention."""
        g = tokens_graph(self.e.model, batch, q_len, kv_len, self.e.dtype)
        return fuse(rewritten(g, self.e, as_in_engines(self.techniques)), self.engine, self.e.model)

    def seconds(self, op: Op) -> float:
        """GPU seconds of one operator or collective."""
        if not op.axis:
            few = op.kind == "gemm" and op.shape[-3] <= FEW_ROWS * max(1.0, op.experts)
            own = few and self.engine.stream_share
            seconds = 0.0 if own else op_time(op, self.cluster.device).seconds
            return self.engine.gap_s + (max(seconds, self._streamed(op)) if few else seconds)
        ring = collective_time(op, self.cluster).seconds
        return min(ring, one_shot(op, self.cluster)) if self.engine.one_shot else ring

    def _streamed(self, op: Op) -> float:
        """Minimum seconds in which the engine's kernels read the weights of a product."""
        codes = op.weight_dtype not in ("", op.dtype) and DTYPE_BYTES.get(op.weight_dtype, 0.0) < 1
        engine, device = self.engine, self.cluster.device
        each = min(engine.stream_bytes, engine.code_bytes if codes else math.inf)
        rate = engine.stream_share * device.memory_bandwidth or math.inf
        if device.sm_count and device.clock:
            rate = min(rate, each * device.sm_count * device.clock)
        _, out, inner = op.shape[-3:]
        return (op.weight_bytes or max(1.0, op.experts) * out * inner * DTYPE_BYTES[op.dtype]) / rate

    def total(self, g: Graph, *, attention: bool, head: bool | None = None) -> float:
        """Seconds of attention or of everything else, in all blocks, in the head, or in everything except the head."""
        total = 0.0
        for b in g.blocks:
            if head is None or b.is_head == head:
                chosen = [o for o in b.forward if _attends(o) == attention]
                seconds = sum(self.seconds(o) for o in chosen)
                more = 0.0 if attention else len(chosen) * self.cluster.device.in_step(g.tokens)
                total += b.repeat * max(seconds / 2, seconds + more)  # cache savings are limited
        return total

    def _links(self, g: Graph) -> float:
        return sum(b.repeat * sum(self.seconds(o) for o in b.forward if o.axis) for b in g.blocks if not b.is_head)

    def _expanding(self, g: Graph) -> float:
        experts = self.engine.expand_share
        dense = self.engine.dense_expand_share or experts
        return sum(
            b.repeat * self.seconds(o) * (1 / (experts if o.experts > 1 else dense) - 1)
            for b in g.blocks for o in b.forward if o.weight_dtype not in ("", o.dtype)
        )  # fmt: skip


def _attends(op: Op) -> bool:
    return op.module == "attention" and op.kind in ATTENTION


_parts: list[tuple[Device, tuple[Hashable, ...], Parts]] = []
_MOST_PARTS = 128
"""As many as a search tries in turn of the layers that stay on the device, beside each way to schedule requests."""


def parts_of(e: Experiment, techniques: list[Technique], cluster: Cluster, engine: EngineCosts) -> Parts:
    """The :class:`Parts` of an inference experiment, cached for others that differ only in their workload, or in how
    requests are scheduled."""
    techniques = [t for t in techniques if not isinstance(t, SchedulingTechnique)]
    device = cluster.device
    mesh = (tuple(e.parallel.items()), cluster.devices_per_node, cluster.nodes)
    key = (tuple(techniques), mesh, e.dtype, engine, e.model)
    for i, (known_device, known_key, parts) in enumerate(_parts):
        if known_device is device and known_key == key:
            _parts.insert(0, _parts.pop(i))
            return parts
    parts = Parts(e, techniques, cluster, engine)
    _parts.insert(0, (device, key, parts))
    del _parts[_MOST_PARTS:]
    return parts


def _most_at_once(parts: Parts) -> float:
    """Tokens up to which our engine's host need not know how many rows each expert has, as experts are computed all at
    once (:func:`ridgeline.nn.model.moe.most_tokens_at_once`): in 16 bits; of experts in codes up to as many rows as
    these are multiplied for."""
    e, device = parts.e, parts.cluster.device
    m = e.model
    if not m.num_experts:
        return math.inf
    if DTYPE_BYTES[e.dtype] != 2 or not all(t.groups_experts(e) for t in parts.techniques):
        return 0
    ops = [o for b in parts.graph(1, 1, 1).blocks for o in b.forward if o.kind == "gemm" and ".experts." in o.name]
    kinds = {o.weight_dtype for o in ops if o.weight_dtype}
    if not kinds:  # PyTorch's grouped product
        fits = m.hidden_size % 8 == m.intermediate_size // e.parallel.get("tp", 1) % 8 == 0
        return math.inf if fits and device.architecture.lower() not in ("volta", "turing") else 0
    casts = "fp8" in kinds and "fp8" in device.peak_flops
    return (FLOAT8_ROWS if casts else MANY_ROWS) * m.num_experts // m.experts_per_token


class Iterations:
    """The cost model of one replica (``data_parallel`` of them share the arrivals).

    ``contexts`` are the smallest and largest numbers of cached tokens of a sequence, between which decode attention is
    assumed to be linear.
    """

    def __init__(
        self,
        e: Experiment,
        techniques: list[Technique],
        cluster: Cluster,
        engine: EngineCosts,
        contexts: tuple[int, int],
    ) -> None:
        self.most_captured: float = CAPTURED_SEQUENCES
        """Decoding sequences of a captured iteration of our engine."""
        if engine.name == OWN:
            parts = parts_of(e, techniques, cluster, engine)
            if not parts.alone and captures(e.model) and all(t.captured for t in techniques):
                self.most_captured = min(CAPTURED_SEQUENCES, _most_at_once(parts))
            else:
                self.most_captured = 0
            engine = replace(engine, graphs=engine.graphs and self.most_captured > 0)
        self.e, self.cluster, self.engine = e, cluster, engine
        workers = e.world // e.data_parallel
        self.between_s = engine.iteration_s + (workers * engine.worker_s if workers > 1 else 0.0)
        """Seconds between iterations that nothing overlaps."""
        low, high = max(1, contexts[0]), max(2, contexts[1])
        self.contexts = (low, max(high, low + 64))
        self.parts = parts = parts_of(e, techniques, cluster, engine)
        self.graph, self.body = parts.graph, parts.body
        self.links, self.expanding = parts.links, parts.expanding
        self._short = Interpolated(lambda b: parts.attention(b, 1, self.contexts[0]))
        self._long = Interpolated(lambda b: parts.attention(b, 1, self.contexts[1]))
        self._chunk = Interpolated(lambda q: parts.attention(1, q, q))
        self._behind = Interpolated(lambda q: parts.attention(1, q, q + self.contexts[1]))
        self.dispatch_s = parts.dispatch_s
        """Host seconds to issue the operators of one eager iteration."""
        self._plain: dict[int, tuple[float, float]] = {}
        self._drafted: dict[int, tuple[float, float, float, int]] = {}
        s, device = engine.scheduling(techniques), cluster.device
        if isinstance(e.workload, Serve):
            s.take_workload(e.workload)
        self.speculation = s.speculation
        captured = engine.name == OWN and engine.graphs and device.kind == "gpu" and not s.limits.padded
        most = min(s.limits.max_num_batched_tokens, _most_at_once(parts)) if captured else 0
        self.captured = [t for t in captured_tokens(s.limits.max_num_batched_tokens) if t <= most]
        """Tokens of captured iterations with prompts."""
        self.layers = remaining_model(e).num_layers
        self.repeat = e.model.num_heads // e.model.num_kv_heads
        logits = 4.0 * e.model.vocab_size / e.parallel.get("tp", 1)
        self._choosing = (s.logit_reads - 1) * logits / device.memory_bandwidth if device.kind == "gpu" else 0.0
        """Seconds of each additional read of a row of logits; on a CPU, its part of the engine's measured time."""

    def head(self, rows: int) -> float:
        """Seconds to compute the logits of ``rows`` sequences and choose tokens from them."""
        return self.parts.head(rows) + rows * self._choosing

    def prompt_attention(self, q: int, before: int) -> float:
        """Attention seconds of a prompt chunk of ``q`` tokens after ``before`` tokens that are already cached."""
        own = self._chunk(q)
        return own if not before else own + (self._behind(q) - own) * before / self.contexts[1]

    def decode(self, n: int) -> tuple[float, float]:
        """(a, b): GPU seconds of a token for each of ``n`` sequences with K cached tokens in all are a + b·K."""
        a, b, tokens, _ = self._drafts(n)
        return a / tokens, b / tokens

    def between(self, n: int) -> float:
        """Seconds added to a decode iteration with ``n`` sequences for each token generated, while the GPU is idle."""
        *_, tokens, rows = self._drafts(n)
        return self._waits(n, rows) / tokens

    def floor(self, n: int) -> float:
        """Seconds per token of what overlaps with the GPU in a decode iteration with ``n`` sequences (the host's work,
        the transfer of weights): the iteration takes at least that long."""
        *_, tokens, rows = self._drafts(n)
        return self._beside(n, rows) / tokens

    def _one(self, n: int) -> tuple[float, float]:
        """(a, b) of an iteration that generates one token for each of ``n`` sequences."""
        found = self._plain.get(n)
        if found is None:
            low, high = self.contexts
            short, long = self._short(n), self._long(n)
            slope = max(0.0, (long - short) / (high - low))
            found = self._plain[n] = (self.body(n) + self.head(n) + short - slope * low, slope / n)
        return found

    def _drafts(self, n: int) -> tuple[float, float, float, int]:
        """(a, b, tokens generated per sequence, rows computed) of a decode iteration, with drafts if they increase
        throughput."""
        found = self._drafted.get(n)
        if found is None:
            found = (*self._one(n), 1.0, n)
            if self.speculation is not None:
                cached = n * sum(self.contexts) / 2
                found = min(found, self._checked(n, self.speculation), key=lambda way: self._spent(n, cached, way))
            self._drafted[n] = found
        return found

    def _spent(self, n: int, cached: float, way: tuple[float, float, float, int]) -> float:
        a, b, tokens, rows = way
        return (max(a + b * cached, self._beside(n, rows)) + self._waits(n, rows)) / tokens

    def _checked(self, n: int, s: Speculation) -> tuple[float, float, float, int]:
        """Drafts one after another, and a verification pass over them and one more token (arXiv:2211.17192), of a tree
        over all of its nodes (arXiv:2406.16858)."""
        rows, (low, high) = s.rows, self.contexts
        short, long = (self.parts.attention(n, rows, c + rows) for c in (low, high))
        slope = max(0.0, (long - short) / (high - low))
        size = 0 if s.nodes else self._size(n, n * rows, 0)
        a, b = self.body(size or n * rows) + self.head(n * rows) + short - slope * low, slope / n
        if self.engine.name == OWN and not size:  # which captures no trees
            a += max(0.0, self.dispatch_s - a - b * n * (low + high) / 2)
        if s.model is not None:
            alone = {"model": s.model, "plan": Plan(), "parallel": {}}
            same = [t for t in self.parts.techniques if t.card.in_engines]
            small = Iterations(self.e.model_copy(update=alone), same, self.cluster, self.engine, self.contexts)
            levels = [(s.branches, s.branches)] * (s.tokens - 1)
            host = small.dispatch_s
            if self.engine.name == OWN and not s.head and small.engine.graphs and n <= small.most_captured:
                host = self.between_s + self.engine.sequence_s * n  # of a captured pass, which the host composes
            # A head first reads what was kept of the last draft, with the model's hidden states.
            first = (math.ceil(s.expected_tokens), 1) if s.head else (1, 1)
            for read, drafted in (first, *levels):
                more, grow = small._read(n, read, drafted, s.head)
                a, b = a + max(more, host), b + grow
            if s.head and self.engine.name == OWN:  # whose host composes every level as it does an iteration
                a += s.tokens * (self.between_s + self.engine.sequence_s * n)
        return a, b, s.expected_tokens, n * rows

    def _read(self, n: int, rows: int, drafted: int, joins: bool) -> tuple[float, float]:
        """(a, b) of a pass over ``rows`` of each of ``n`` sequences, with logits of ``drafted`` of them. ``joins``:
        what it reads is a product of two tensors as wide as the model."""
        if rows == drafted == 1 and not joins:
            return self._one(n)
        low, high = self.contexts
        short, long = (self.parts.attention(n, rows, c + rows) for c in (low, high))
        slope = max(0.0, (long - short) / (high - low))
        join = self.parts.seconds(_join(self.e, n * rows)) if joins else 0.0
        return join + self.body(n * rows) + self.head(n * drafted) + short - slope * low, slope / n

    def _waits(self, n: int, rows: int) -> float:
        e = self.engine
        between = self.parts.before(rows) + self.between_s
        return between if e.overlap else between + e.schedule_s + e.sequence_s * n

    def _beside(self, n: int, rows: int, eager: bool = False) -> float:
        e = self.engine
        hidden = e.schedule_s + e.sequence_s * n if e.overlap else 0.0
        eager = eager or not e.graphs or (e.name == OWN and n > self.most_captured)
        text = e.reply_s + e.token_s * n - self._waits(n, rows)
        issued = self.dispatch_s + (n - 1) * self.parts.sequence_s if eager else 0.0
        return max(hidden + issued, self.parts.beside(rows), text)

    def _size(self, decoding: int, tokens: int, prompts: int) -> int:
        """Number of tokens to which an iteration is padded as it was captured; 0: it was not. ``decoding``: sequences
        of a token or a draft; ``tokens``: of all."""
        fit = (t for t in self.captured if t >= tokens and captured_prompts(t) >= prompts)
        return next(fit, 0) if decoding <= self.most_captured else 0

    def mixed(self, prompts: list[tuple[int, int]], n: int, cached: int, pads: int = 0) -> float:
        """Seconds of an iteration of prompt chunks ``(tokens, tokens before)`` and ``n`` decoding sequences, which do
        not draft then. One that Ridgeline's own engine has captured is one launch, of as many tokens as were captured.

        ``cached``: total number of cached tokens of the decoding sequences. ``pads``: padding rows that are computed in
        addition to the tokens, except in attention.
        """
        if prompts and self.engine.last_apart:
            rest = [(q - 1, before) for q, before in prompts if q > 1]
            context = cached + sum(q + before for q, before in prompts)
            return (self._mixed(rest, 0, 0, pads) if rest else 0.0) + self._mixed([], n + len(prompts), context)
        return self._mixed(prompts, n, cached, pads)

    def _mixed(self, prompts: list[tuple[int, int]], n: int, cached: int, pads: int = 0) -> float:
        new = sum(q for q, _ in prompts)
        if not new:
            a, b = self.decode(n)
            gpu = a + b * cached
            return max(gpu, self.floor(n)) + self.between(n)
        rows = n + len(prompts)
        attention = sum(self.prompt_attention(q, before) for q, before in prompts)
        new += pads
        sequences = [(q, before + q) for q, before in prompts] + [(1, cached // max(n, 1))] * n
        far = divides_far_keys(sequences, 1, self.repeat)
        size = 0 if far else self._size(n, n + new, len(prompts))
        computed = size or n + new
        whole, links = self.body(computed), self.links(computed)
        slow = attention + whole - links - (self.body(n) - self.links(n) if n else 0.0)
        extra = slow * (1 / self.engine.prefill_share - 1)
        extra += self.expanding(computed) - (self.expanding(n) if n else 0.0)
        gpu = whole + attention + self.head(rows) + extra
        if n:
            a, b = self._one(n)
            gpu += a + b * cached - self.body(n) - self.head(n)
        over = max(0, new - self.engine.spill_tokens) if self.engine.spill_tokens else 0
        host = self.engine.layer_s * self.layers + over * self.engine.spill_s
        return max(gpu, self._beside(rows, computed, eager=not size)) + host + self._waits(rows, computed)


def _join(e: Experiment, rows: int) -> Op:
    """The product by which a draft head joins hidden states and embeddings."""
    h, dtype = e.model.hidden_size, e.dtype
    moved = (3.0 * rows * h + 2.0 * h * h) * DTYPE_BYTES[dtype]
    return Op("fuse", "draft", "gemm", flops=4.0 * rows * h * h, bytes=moved, dtype=dtype, shape=(rows, h, 2 * h))


def one_shot(op: Op, cluster: Cluster) -> float:
    """Seconds of an all-reduce as one kernel that reads its peers' buffers: all of them, or a part and a second pass.

    Infinite without a direct link, across nodes, and for other collectives.
    """
    link, n, device = cluster.device.link, op.ranks, cluster.device
    if op.kind != "all_reduce" or link is None or not link.p2p or n < 2 or n > cluster.devices_per_node:
        return float("inf")
    bandwidth = link.across(n)
    once = link.latency + (n - 1) * op.link_bytes / bandwidth
    twice = 3 * link.latency + 2 * (n - 1) / n * op.link_bytes / (bandwidth * 0.8)
    barrier = n / 2 * link.latency  # every rank signals and waits for its peers
    return device.launch_latency + barrier + min(once, twice)
