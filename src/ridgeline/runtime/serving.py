"""What the serving engine offers a technique."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from subprocess import Popen

import torch

from ridgeline.nn.paged import Layout
from ridgeline.nn.pass_memory import Forward
from ridgeline.nn.transformer import Transformer
from ridgeline.runtime.build import Build
from ridgeline.runtime.mesh import Mesh


@dataclass
class Limits:
    """What a step and the queue may hold, and which freedoms the scheduler has. Techniques set them."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    """Sequences that may wait."""
    max_waiting_tokens: int = 1 << 20
    """Prompt tokens that may wait."""
    continuous: bool = True
    """Whether sequences join while others run; if not, a batch runs until its last member ends."""
    chunked: bool = True
    """Whether a step may compute a part of a prompt."""
    reserve: bool = False
    """Whether a sequence gets the blocks of its longest possible length at once, in one extent."""
    padded: bool = False
    """Whether every sequence of a step takes as many rows as the one with most new tokens; pads count as tokens."""


@dataclass
class Drafts:
    """How next tokens are guessed."""

    tokens: int
    """Most tokens of one draft."""
    ngram: int
    """Longest n-gram that is looked for in the text so far."""
    model: Transformer | None = None
    """A smaller model that drafts instead."""


Cost = Callable[[int, int], float]
"""Seconds of a batch by its length and its size; infinite for one that is too large."""
Cut = Callable[[Sequence[int], Sequence[str], Cost, Cost], list[list[int]]]
"""Divides sequences, of which lengths and adapters are given, into batches, as indices. The costs: what a batch takes,
and what sequences of one adapter in it add."""


@dataclass
class ServeBuild(Build):
    """The serving engine before it exists: techniques change these fields, then it is made of them."""

    mesh: Mesh | None = None
    """The ranks on their axes; None with one process."""
    followers: list[Popen[bytes]] = field(default_factory=list)
    """Processes of the other ranks, where this one started them."""
    kv_heads: int = 0
    """Key/value heads that this rank holds."""
    limits: Limits = field(default_factory=lambda: Limits(continuous=False, chunked=False, reserve=True, padded=True))
    block_size: int = 16
    """Slots of a cache block."""
    share_prefixes: bool = False
    """Whether equal prefixes share blocks."""
    cache_kind: str = ""
    """fp8, int8 or int4: the pool holds codes; empty: the weights' dtype."""
    hierarchical: bool = False
    """Whether the vocabulary is searched in two levels."""
    adapters: bool = False
    """Whether adapters can be loaded."""
    drafts: Drafts | None = None
    """Guesses at the next tokens; None: none."""
    memory: Callable[[Forward, Layout, torch.device], Forward] | None = None
    """Puts a memory of its own around the forward pass; None: results are allocated one by one."""
    cut: Cut | None = None
    """Which waiting sequences are served together; None: first come, first served."""
    per_task: bool = False
    """Whether the cut asks for what adapters add."""
