"""The serving engine's interface for techniques."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from subprocess import Popen

import torch

from ridgeline.nn.memory.block_store import BlockStore
from ridgeline.nn.memory.kv_pool import BatchLayout
from ridgeline.nn.memory.pass_memory import Forward
from ridgeline.nn.model.draft_head import DraftHead
from ridgeline.nn.model.transformer import Transformer
from ridgeline.runtime.build import Build
from ridgeline.runtime.mesh import Mesh
from ridgeline.spec.scheduling import Scheduling


@dataclass
class Drafts:
    """How draft tokens are proposed."""

    tokens: int
    """Maximum number of tokens per draft."""
    ngram: int
    """Longest n-gram that is looked up in the text so far."""
    model: Transformer | None = None
    """A smaller draft model."""
    head: DraftHead | None = None
    """A head that was trained for the model."""
    branches: int = 1
    """Tokens that a head proposes behind each; 1: a chain."""
    nodes: int = 0
    """Most tokens of a tree."""


@dataclass
class ServeBuild(Scheduling, Build):
    """The serving engine before it is created: techniques change these fields, and the engine is built from them."""

    mesh: Mesh | None = None
    """The ranks on their axes; None with one process."""
    followers: list[Popen[bytes]] = field(default_factory=list)
    """Processes of the other ranks, if this one started them."""
    kv_heads: int = 0
    """Number of key/value heads that this rank holds."""
    hierarchical: bool = False
    """Whether the vocabulary is searched in two levels."""
    adapters: bool = False
    """Whether adapters can be loaded."""
    drafts: Drafts | None = None
    """How tokens are drafted; None: no drafts."""
    memory: Callable[[Forward, BatchLayout, torch.device], Forward] | None = None
    """Wraps the forward pass with its own memory management; None: results are allocated one by one."""
    captured: bool = True
    """Whether steps may be captured as CUDA graphs."""
    role: str = ""
    """What a fleet's router prefers to use the server for: prefill, decode or mixed; empty: it sends and receives no
    caches of prompts."""
    whole_below: int = 0
    """Prompts with fewer tokens are sent at once, longer ones layer by layer."""
    per_task: bool = False
    """Whether the batching function needs the costs of adapters."""
    block_store: Callable[[Sequence[Sequence[torch.Tensor]], int], BlockStore] | None = None
    """Makes a store for the cache blocks that the pool drops, from each layer's tensors of the pool and the size of a
    block; None: their contents are lost."""
