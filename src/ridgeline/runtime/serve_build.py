"""What the serving engine offers a technique."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from subprocess import Popen

import torch

from ridgeline.nn.memory.kv_pool import BatchLayout
from ridgeline.nn.memory.pass_memory import Forward
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.mesh import Mesh
from ridgeline.runtime.train_build import Build
from ridgeline.spec.scheduling import Scheduling


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
class ServeBuild(Scheduling, Build):
    """The serving engine before it exists: techniques change these fields, then it is made of them."""

    mesh: Mesh | None = None
    """The ranks on their axes; None with one process."""
    followers: list[Popen[bytes]] = field(default_factory=list)
    """Processes of the other ranks, where this one started them."""
    kv_heads: int = 0
    """Key/value heads that this rank holds."""
    hierarchical: bool = False
    """Whether the vocabulary is searched in two levels."""
    adapters: bool = False
    """Whether adapters can be loaded."""
    drafts: Drafts | None = None
    """Guesses at the next tokens; None: none."""
    memory: Callable[[Forward, BatchLayout, torch.device], Forward] | None = None
    """Puts a memory of its own around the forward pass; None: results are allocated one by one."""
    cut: Cut | None = None
    """Which waiting sequences are served together; None: first come, first served."""
    per_task: bool = False
    """Whether the cut asks for what adapters add."""
