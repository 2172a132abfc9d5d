"""What the serving engine offers a technique."""

from __future__ import annotations

from dataclasses import dataclass, field
from subprocess import Popen

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


@dataclass
class Drafts:
    """How next tokens are guessed."""

    tokens: int
    """Most tokens of one draft."""
    ngram: int
    """Longest n-gram that is looked for in the text so far."""
    model: Transformer | None = None
    """A smaller model that drafts instead."""


@dataclass
class ServeBuild(Build):
    """The serving engine before it exists: techniques change these fields, then it is made of them."""

    mesh: Mesh | None = None
    """The ranks on their axes; None with one process."""
    followers: list[Popen[bytes]] = field(default_factory=list)
    """Processes of the other ranks, where this one started them."""
    kv_heads: int = 0
    """Key/value heads that this rank holds."""
    limits: Limits = field(default_factory=lambda: Limits(continuous=False, chunked=False, reserve=True))
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
