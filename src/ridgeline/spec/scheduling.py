"""Scheduling and cache of a serving engine, as a plan determines them, for the real and the simulated engine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ridgeline.spec.errors import UserError
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.workload import Serve

OWN = "ridgeline"
"""The name of Ridgeline's own serving engine."""
CAPTURED_SEQUENCES = 256
"""Maximum number of decoding sequences in a step that it captures as a CUDA graph."""
CAPTURED_TOKENS: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792,
                                    2048)  # fmt: skip
"""Tokens of the captured steps that have prompts; a step is padded to the next of them."""
WIDEST_HEAD = 256
"""Maximum head dimension of its paged attention on GPUs, which steps need to be captured."""
CACHE_SHARE = {"cpu": 0.25, "gpu": 0.9}
"""Default for the largest fraction of free memory that the key/value pool takes: others need a computer's; of a
GPU's, the rest is for the largest step and for captured ones."""


SCORE_BYTES, CHANGED_SCORE_BYTES = 8, 12
"""Bytes for each pair of a query and a key while a layer without fused attention computes: in 32 bits the scores and
what a mask or the softmax makes of them; in 16 bits scores, their softmax in 32 bits, and that in 16 bits. With soft
caps, ALiBi or sinks there is one more."""
DRAFTED = 16
"""Sequences of full length that a drafting model's cache has room for."""


def captures(m: ModelSpec) -> bool:
    """Whether steps of a model can be captured as CUDA graphs: those whose attention is one kernel over the pages,
    which there is not for latent attention and wider heads."""
    return not m.is_latent and m.cached_dim <= WIDEST_HEAD


def captured_tokens(most: int) -> list[int]:
    """:data:`CAPTURED_TOKENS` of an engine whose steps have ``most`` tokens at most."""
    return sorted({min(n, most) for n in CAPTURED_TOKENS})


def captured_prompts(tokens: int) -> int:
    """Prompts that a captured step of ``tokens`` has room for: attention starts programs for each, also for those that
    are not there."""
    return 8 + tokens // 32


FEW_ROWS = 64
"""Most rows of a sequence (new tokens · query heads of a key head) whose keys attention divides over programs."""
FAR = 8192
"""Tokens of a sequence from which few programs read them for longer than a step takes to be launched."""


FEW_DECODING = 16
"""Decoding sequences that captured steps with prompts have room for, beside none and the most."""


def divides_far_keys(sequences: Sequence[tuple[int, int]], few: int, repeat: int) -> bool:
    """Whether a step with prompts should divide the keys of long sequences over more programs than if it were captured:
    then it divides those of decoding sequences alone, over as many programs as if all that it has room for were there.

    ``sequences``: new tokens and length of each; ``few``: most new tokens of one that decodes; ``repeat``: query heads
    of a key head.
    """
    far = [n for n, length in sequences if length > FAR and n * repeat <= FEW_ROWS]
    alone = 2 * sum(n <= few for n, _ in sequences) <= FEW_DECODING
    return any(n > few or alone for n in far)


@dataclass
class Limits:
    """Limits of a step and of the queue, and options of the scheduler. Techniques set them."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int | None = 1024
    """Sequences that may wait; None: any number."""
    max_waiting_tokens: int | None = 1 << 20
    """Prompt tokens that may wait; None: any number."""
    continuous: bool = True
    """Whether sequences join running ones; if not, a batch runs until its last sequence ends."""
    chunked: bool = True
    """Whether a step may compute a part of a prompt."""
    reserve: bool = False
    """Whether a sequence gets the blocks of its longest possible length at once, in one extent."""
    padded: bool = False
    """Whether every sequence of a step takes as many rows as the one with most new tokens; pads count as tokens."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding, as predicted."""

    tokens: int
    """Tokens of one draft."""
    acceptance: float
    """Probability that a drafted token is kept, each like the next; of a tree, that one of those behind a kept one
    is."""
    model: ModelSpec | None = None
    """The smaller model that drafts; None: drafts cost nothing."""
    nodes: int = 0
    """Tokens of a tree of drafts, of which ``tokens`` are one path; 0: they are a chain."""
    branches: int = 1
    """Rows of a sequence that ``model`` reads for each of ``tokens`` levels but the first."""
    head: bool = False
    """Whether ``model`` is a head, which reads the model's hidden states and embeddings, joined."""

    @property
    def expected_tokens(self) -> float:
        """Expected tokens per pass: (1 - a^(k+1)) / (1 - a) (arXiv:2211.17192, equation 1)."""
        return sum(self.acceptance**i for i in range(self.tokens + 1))

    @property
    def rows(self) -> int:
        """Rows of a sequence in the pass that checks a draft: the last known token's and those of all drafted ones."""
        return 1 + (self.nodes or self.tokens)


Cost = Callable[[int, int], float]
"""Seconds of a batch by its length and size; infinite if it is too large."""
Cut = Callable[[Sequence[int], Sequence[str], Cost, Cost], list[list[int]]]
"""Divides sequences, given their lengths and adapters, into batches, as indices. The costs: the time of a batch, and
the additional time of one adapter's sequences in it."""


@dataclass(kw_only=True)
class Scheduling:
    """What techniques may change about scheduling (:meth:`Technique.scheduling`); defaults: without any."""

    limits: Limits = field(default_factory=lambda: Limits(continuous=False, chunked=False, reserve=True, padded=True))
    block_size: int = 16
    """Slots of a cache block."""
    share_prefixes: bool = False
    """Whether equal prefixes share blocks."""
    cut: Cut | None = None
    """Which waiting sequences are batched together; None: first come, first served."""
    cache_kind: str = ""
    """Quantized storage of the pool, fp8, int8 or int4; empty: the weights' dtype."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage, where they are not divided evenly."""
    logit_reads: int = 5
    """Times that choosing a token reads a row of logits: four passes of a radix selection over 32-bit keys, and one
    that gathers what it found."""
    beside_elements: int = 0
    """Elements that something other than the layers keeps of each token in the pool, of the weights' dtype."""
    beside_parameters: int = 0
    """Elements, of the weights' dtype, of what drafts beside the model."""
    draft_model: ModelSpec | None = None
    """The smaller model that drafts, with a cache of its own."""
    flash: bool = False
    """Whether attention is one operator; if not, it has matrices of scores."""
    speculation: Speculation | None = None
    """Speculation with a known acceptance rate, for the prediction; None: none, or unknown."""

    def take_workload(self, w: Serve) -> None:
        """Apply the limits of the workload."""
        self.limits.max_num_seqs = w.max_num_seqs or self.limits.max_num_seqs
        self.limits.max_num_batched_tokens = w.max_num_batched_tokens or self.limits.max_num_batched_tokens

    def block_bytes(self, m: ModelSpec, layers: int, kv_heads: float, width: float) -> float:
        """Bytes of one block on a rank with this many layers and heads. ``width``: bytes of an unquantized element."""
        each = kv_bytes(self.cache_kind, m.cached_dim) if self.cache_kind else width
        return self.block_size * (m.cached_tensors * layers * kv_heads * m.cached_dim * each
                                  + self.beside_elements * width)  # fmt: skip

    def score_bytes(self, m: ModelSpec, longest: int, width: float, ranks: int = 1) -> float:
        """Bytes of the score matrices of one layer and one sequence, the most that are there at once, for prompt and
        output of ``longest`` tokens together, with the mask and the gathered keys and values; 0 where attention is
        fused. ``width``: bytes of an element of keys; ``ranks``: that a layer's heads are divided over."""
        if self.flash:
            return 0.0
        rows = min(self.limits.max_num_batched_tokens, longest) if self.limits.chunked else longest
        each = CHANGED_SCORE_BYTES if m.score_changes else SCORE_BYTES
        gathered = 2 * m.cached_tensors * m.cached_heads * m.cached_dim * width
        return (m.num_heads / ranks + 1) * rows * longest * each + longest * gathered

    def draft_blocks(self, longest: int, blocks: int) -> int:
        """Blocks of the drafting model's own cache beside a pool of ``blocks``: as many, but no more than
        :data:`DRAFTED` sequences of full length have; 0: nothing drafts that has one."""
        if self.draft_model is None:
            return 0
        return min(blocks, DRAFTED * -(-min(longest, self.draft_model.max_positions) // self.block_size))

    def draft_block_bytes(self, width: float) -> float:
        """Bytes of one of them. ``width``: of an element."""
        d = self.draft_model
        elements = 0 if d is None else d.cached_tensors * d.num_layers * d.cached_heads * d.cached_dim
        return self.block_size * elements * width

    def pool(
        self, m: ModelSpec, w: Serve, each: float, free: float, kind: str, width: float, ranks: int = 1
    ) -> tuple[int, int]:
        """(blocks of the pool, longest prompt and output together): what was asked for, or what the running sequences
        could use within a share of ``free`` bytes, beside the score matrices of the longest sequence, which is shorter
        where these leave its keys and values no room. ``each``: bytes of a block; ``kind``: of the device, cpu or gpu;
        ``width`` and ``ranks``: as of :meth:`score_bytes`.

        Raises :class:`UserError` for a pool without room.
        """
        longest = context(m, w)
        if w.kv_cache_bytes is not None:
            found = int(w.kv_cache_bytes / each)
        else:
            share = w.kv_cache_share or CACHE_SHARE[kind]

            def fitting(tokens: int) -> int:
                """Blocks beside the score matrices of ``tokens``."""
                room = share * (free - self.score_bytes(m, tokens, width, ranks))
                drafts, most = self.draft_block_bytes(width), self.draft_blocks(tokens, 1 << 62)
                return int(max(min(room / (each + drafts), most), (room - most * drafts) / each))

            full = -(-longest // self.block_size)
            if fitting(longest) < full:
                short = bisect_left(range(1, full), True, key=lambda n: fitting(n * self.block_size) < n)
                longest = max(1, short) * self.block_size
            found = min(self.limits.max_num_seqs * full, fitting(longest))
        if found < 2:
            raise UserError(
                f"the key/value pool has room for {max(0, found)} blocks of {each:.0f} bytes",
                "give it more memory, or use kv_quant",
            )
        return found, min(longest, found * self.block_size)


def engine_name(name: str, device: str) -> str:
    """The engine that ``name`` stands for: if empty, Ridgeline's own on this machine, and elsewhere none (empty), for
    the plan's own schedule."""
    return name.strip().lower() or (OWN if device == "local" else "")


def context(m: ModelSpec, w: Serve) -> int:
    """Longest prompt and output together, as far as the pool has room for them."""
    return min(w.max_model_len or m.max_positions, m.max_positions)
