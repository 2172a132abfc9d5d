"""What the serving engine offers a technique."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ridgeline.runtime.build import Build

if TYPE_CHECKING:
    from collections.abc import Sequence


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


Propose = Callable[["Sequence[Any]", list[int]], list[list[int]]]
"""Drafts: for each sequence (its ``tokens`` are what is known of it) at most so many tokens that may follow."""


@dataclass
class ServeBuild(Build):
    """The serving engine before it exists: techniques change these fields, then it is made of them."""

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
    propose: Propose | None = None
    """A drafter."""
    draft_tokens: Callable[[int], int] = lambda running: 0
    """Tokens to draft for each sequence, by how many run."""
