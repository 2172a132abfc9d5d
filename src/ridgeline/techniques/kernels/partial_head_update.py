"""Partial head update: attention head by head, each added to the output as soon as it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.kernels.piece_sizes import attention_piece, cache_share, workspaces
from ridgeline.techniques.registry import having
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build


class PartialHeadUpdate(Technique):
    """Compute the attention of a prompt a few heads at a time, multiply by their rows of the output projection, add to
    the output and free the rest (NLP-Fast's partitioning). Within a head, scores exist for a block of queries and keys
    that stays in cache, with the running maximum and sum of the online softmax (arXiv:1805.02867); where the plan has a
    fused kernel, that computes the heads."""

    card: ClassVar[Card] = Card(
        name="partial_head_update",
        title="Partial head update",
        paper="doi:10.1109/PACT52795.2021.00013",
        taxonomy="training/model/partitioning",
        tasks=frozenset({"generate"}),
        lossless=True,
        claim="part of NLP-Fast, whose optimizations together raise throughput up to 2.92x on a CPU, 1.59x on a GPU",
        changes=frozenset({"fused_attention"}),
        example={"rows": 4, "keys": 4},
        conflicts={
            "weights": "{other} stores the projections in codes, whose columns do not come singly",
            "products": "{other} computes the projections' products itself",
            "divided_linears": "{other} divides the heads over ranks",
            "low_rank": "{other} adds to the projections' results",
        },
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 4

    heads: int | None = Field(default=None, ge=1)
    """Number of query heads at a time; None: those that share a key/value head."""
    rows: int | None = Field(default=None, ge=1)
    """Number of queries whose scores exist at a time; None: from the device's cache."""
    keys: int | None = Field(default=None, ge=1)
    """Number of keys for which they exist; None: likewise."""

    @classmethod
    def choices(cls, e: Experiment) -> list[Technique]:
        """None: what it gains in time depends on caches, which predictions of whole models do not follow."""
        return []

    def check(self, e: Experiment) -> None:
        """Heads come in groups that share a key/value head, and sizes of blocks need a kernel of our own."""
        m = e.model
        group = m.num_heads // m.num_kv_heads
        heads = self.heads or group
        self.needs(heads % group == 0 and m.num_heads % heads == 0,
                   f"heads={heads} does not divide the {m.num_heads} heads of {m.name} into whole groups of {group}",
                   f"use a multiple of {group} that divides {m.num_heads}")  # fmt: skip
        special = [
            *m.score_changes,
            *(["norms over the queries of all heads"] if m.joint_qk_norm else []),
            *(["latent attention"] if m.is_latent else []),
            *(["rotary embedding of neighboring dimensions"] if m.rope_interleaved and not m.is_latent else []),
        ]
        self.needs(not special, f"{m.name} has {' and '.join(special)}", "leave it out for this model")
        other = self._kernel(e)
        self.needs(not (other and (self.rows or self.keys)), f"the kernel of {other} has its own blocks",
                   f"leave out rows and keys, or {other}")  # fmt: skip

    def _kernel(self, e: Experiment) -> str:
        """Name of a technique with a fused kernel."""
        return next((t.card.name for t in having(e, "fused_attention") if t.card.name != self.card.name), "")

    def piece(self, e: Experiment, batch: int, queries: int, keys: int) -> tuple[int, int]:
        """(rows, keys) of a block of scores."""
        heads = self.heads or e.model.num_heads // e.model.num_kv_heads
        share = cache_share(e.cluster.device)
        rows, columns = attention_piece(batch * heads, queries, keys, max(4.0, DTYPE_BYTES[e.dtype]), share)
        return min(queries, self.rows or rows), min(keys, self.keys or columns)

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Temporaries of one block of scores; of a causal prompt, blocks in the future are left out; the input is read,
        and the sum read and written, for every piece."""
        if g.length == 1:
            return g

        def split(b: Block) -> None:
            other = max(0.0, b.workspace - max(workspaces(b)))
            self._split(b, e)
            b.workspace = max(workspaces(b)) + other

        return g.each_block(split, layers_only=True)

    def _split(self, b: Block, e: Experiment) -> None:
        m = e.model
        rounds = m.num_heads // (self.heads or m.num_heads // m.num_kv_heads)
        b.forward = [_projected_in(rounds, o) for o in b.forward]
        scores = next((o for o in b.forward if o.name == "attention.scores"), None)
        if scores is None:  # fused
            return
        _, queries, keys, _ = scores.shape
        rows, columns = self.piece(e, e.micro_batch_size, queries, keys)
        skips = m.causal and not (m.sliding_window and keys > m.sliding_window)
        done = computed(queries, keys, rows, columns) if skips else 1.0
        diagonal = min(done, (rows + columns) / keys) if skips else 1.0
        shares = {"attention.scores": done, "attention.softmax": done, "attention.values": done,
                  "attention.mask": diagonal}  # fmt: skip
        count = rounds * -(-queries // rows) * -(-keys // columns)
        b.forward = [
            changed(o, flops=o.flops * shares[o.name], bytes=o.bytes * shares[o.name], pieces=count)
            if o.name in shares else o
            for o in b.forward
        ]  # fmt: skip

    def apply(self, run: Build) -> None:
        """Replace the attention of every layer and, unless a technique brings its own, its kernel."""
        from ridgeline.nn.model.attention import Attention
        from ridgeline.techniques.kernels.partial_head_update_torch import PartialHeads, blocked_attention

        e = run.experiment
        if not self._kernel(e):
            run.model.set_attention(blocked_attention(lambda *sizes: self.piece(e, *sizes)))
        for block in run.model.layers.values():
            if isinstance(block.attention, Attention):
                block.attention = PartialHeads(block.attention, self.heads)


def computed(queries: int, keys: int, rows: int, columns: int) -> float:
    """Fraction of the scores that blocks of ``rows`` x ``columns`` compute when blocks in the future are left out."""
    past = keys - queries
    last = [min(queries, first + rows) for first in range(0, queries, rows)]
    sizes = [(stop - first) * min(keys, -(-(past + stop) // columns) * columns)
             for first, stop in zip(range(0, queries, rows), last, strict=True)]  # fmt: skip
    return sum(sizes) / (queries * keys)


def _projected_in(rounds: int, op: Op) -> Op:
    if op.name not in ("attention.q_proj", "attention.o_proj"):
        return op
    m, n, k = op.shape
    width = op.bytes / (m * n + m * k + n * k)
    again = (rounds - 1) * (m * k if op.name == "attention.q_proj" else 2 * m * n)
    return changed(op, bytes=op.bytes + again * width, pieces=rounds)
