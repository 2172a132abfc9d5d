"""What the serving engine offers a technique."""

from __future__ import annotations

from dataclasses import dataclass, field
from subprocess import Popen

from ridgeline.nn.transformer import Transformer
from ridgeline.runtime.build import Build
from ridgeline.runtime.mesh import Mesh
from ridgeline.spec.serving import Scheduling


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
