"""Drafts by a head trained for the model (EAGLE, arXiv:2401.15077), as chains or as trees (EAGLE-2, arXiv:2406.16858).

The head's keys and values lie beside the model's, in the same blocks and at the same places, as do the model's last
hidden states (the features): prefixes that sequences share, copied blocks and blocks that return from a store have
them, too. What the head keeps at a place depends on the tokens up to it and on the feature before it, so that it can be
computed as soon as the token is known. It is computed when a draft is asked for, for all places that lack it: one or
two a step, whole prompts at first, and whatever was generated while nothing was drafted.

Then the tree grows level by level, in batches of all sequences: each of the likeliest nodes of a level, by the product
of probabilities on its path, is read by the head, with the feature that it predicted for the parent in place of the
model's. The head's keys and values of nodes go behind those of the sequence, and attend along their paths.

Shapes: R rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ridgeline.nn.memory.decoder import find_decoder
from ridgeline.nn.memory.kv_pool import PagedCache
from ridgeline.nn.memory.step_pages import upload
from ridgeline.nn.model.draft_head import DraftHead
from ridgeline.serve.block_manager import Blocks, runs
from ridgeline.serve.draft_tree import Candidate, Draft, pruned
from ridgeline.serve.runner import PackedStep, Runner
from ridgeline.serve.sequence import Sequence as Row

FEW = 16
"""Rows of a sequence up to which each is attended to on its own."""


@dataclass
class _Growing:
    """The tree of one sequence."""

    seq: Row
    levels: int
    nodes: list[Candidate] = field(default_factory=list)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of nodes that the head has read, and of -1, the last known token: places in the cache."""
    frontier: list[int] = field(default_factory=list)
    """Nodes that were added last."""

    @property
    def places(self) -> int:
        """Places behind the last known token that nodes have taken."""
        return len(self.paths) - 1

    def likeliest(self, most: int) -> list[int]:
        """Of the nodes that were added last."""
        return sorted(self.frontier, key=lambda n: -self.nodes[n].score)[:most]


class HeadDrafter:
    """Grows trees of ``branches`` nodes a level and of ``nodes`` nodes in all; one branch: a chain."""

    def __init__(
        self, head: DraftHead, runner: Runner, blocks: Blocks, slots: int, longest: int, branches: int, nodes: int,
        rows_at_once: int,
    ) -> None:  # fmt: skip
        """``runner``: the model's; ``slots``: of its pool; ``longest``: tokens of a sequence; ``rows_at_once``: the
        most rows of a pass."""
        self.head, self.target, self.blocks = head, runner, blocks
        self.branches, self.nodes, self.rows_at_once = branches, nodes, rows_at_once
        spec, like = head.body.spec, head.fuse.weight
        self.runner = Runner(head.body, slots, runner.block_size, longest)
        self.runner.decoder = find_decoder(head.body)
        self.features = PagedCache(
            runner.layout, (1, 1, slots, spec.hidden_size + 1), like.dtype, like.device, tensors=1
        )
        """What the model's head reads at each place, and whether the draft head was there: 1 or 0."""
        runner.beside += [c for c in self.runner.cache.values() if isinstance(c, PagedCache)] + [self.features]
        runner.after_pass = self._keep
        self.read: dict[Row, tuple[int, int]] = {}
        """How many tokens of a sequence the head has read, and when the sequence had joined then."""

    @torch.inference_mode()
    def __call__(self, seqs: Sequence[Row], most: list[int]) -> list[Draft]:
        """A tree for each sequence, of at most ``most`` levels."""
        self.read = {s: self.read[s] for s in seqs if s in self.read}
        trees = [_Growing(s, n) for s, n in zip(seqs, most, strict=True) if n > 0 and self._room(s, n, len(seqs))]
        if trees:
            self._grow(trees, self._caught_up([t.seq for t in trees]))
        found = {t.seq: pruned(t.nodes, self.nodes, t.levels) for t in trees}
        return [found.get(s, Draft([])) for s in seqs]

    # ---- the sequence so far -----------------------------------------------------------------------------------------

    def _keep(self, step: PackedStep, hidden: Tensor) -> None:
        """Keep the features of a pass of the model, which the head has not read."""
        if not step.slots:
            return
        (slots,) = upload(hidden.device, step.slots)
        rows = self.features.tensors()[0][0, 0]
        rows[slots, :-1] = hidden.to(rows.dtype)
        rows[slots, -1] = 0

    def _room(self, seq: Row, levels: int, running: int) -> bool:
        """Whether the pool has room for a sequence's nodes, without which nothing is drafted, beside a block for each
        of the ``running`` sequences."""
        wanted = len(seq.tokens) + max(self.nodes, self.branches * (levels - 1))
        if self.blocks.needed(wanted) - len(seq.blocks) > self.blocks.free - running:
            return False
        copies = self.blocks.grow(seq, wanted)
        if copies:
            source, target = ([slot for pair in copies for slot in self._slots_of(pair[i])] for i in (0, 1))
            self.target.move(source, target)
        return copies is not None

    def _slots_of(self, block: int) -> range:
        return range(block * self.blocks.size, (block + 1) * self.blocks.size)

    def _caught_up(self, seqs: list[Row]) -> Tensor:
        """Have the head read all known tokens → the features that it predicts behind them, [sequences, H]."""
        starts = [self._unread(s) for s in seqs]
        ends: list[Tensor] = []
        batch: list[tuple[Row, int, int]] = []
        room = self.rows_at_once
        for seq, first in zip(seqs, starts, strict=True):
            start, total = first, len(seq.tokens)
            while start < total:
                stop = min(total, start + room)
                batch.append((seq, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    ends += self._reads(batch)
                    batch, room = [], self.rows_at_once
        ends += self._reads(batch)
        for seq in seqs:
            self.read[seq] = len(seq.tokens), seq.admitted
        return torch.stack(ends) if len(ends) > 1 else ends[0][None]

    def _unread(self, seq: Row) -> int:
        """The first token that the head has to read: the last known one at the latest."""
        last = len(seq.tokens) - 1
        known, admitted = self.read.get(seq, (0, 0))
        if admitted != seq.admitted:  # it has other blocks
            known = 0
        if known:
            return min(known, last)
        slots = [s for first, n in runs(seq.blocks, self.blocks.size, 0, last) for s in range(first, first + n)]
        if not slots:
            return last
        (at,) = upload(self.target.device, slots)
        seen = self.features.tensors()[0][0, 0, :, -1][at] > 0
        return last if bool(seen.all()) else int((~seen).nonzero()[0])

    def _reads(self, batch: list[tuple[Row, int, int]]) -> list[Tensor]:
        """Have the head read tokens ``start`` to ``stop`` of sequences → the predicted feature [H] behind each that is
        read to its end."""
        if not batch:
            return []
        step, size = PackedStep([]), self.blocks.size
        ids: list[int] = []
        before: list[int] = []
        last: list[int] = []
        for seq, start, stop in batch:
            ids += seq.tokens[start:stop]
            slots = [s for a, n in runs(seq.blocks, size, max(0, start - 1), stop) for s in range(a, a + n)]
            before += slots[:-1] if start else [slots[0], *slots[:-1]]
            if stop - start <= FEW:
                self.runner.add_rows(step, seq.blocks, start, [(i,) for i in range(start, stop)])
            else:
                row = len(step.at)
                step.at += range(start, stop)
                step.pieces.append(self.runner.piece(seq, row, start, stop, step.slots))
            if stop == len(seq.tokens):
                last.append(len(ids) - 1)
        device = self.target.device
        tokens, at, sources, slots_, ends = upload(device, ids, step.at, before, step.slots, last)
        rows = self.features.tensors()[0][0, 0]
        features = rows[sources, :-1]
        if not all(start for _, start, _ in batch):
            features[at == 0] = 0
        x = self.head.join(self.target.embed(tokens[None], at)[0], features)
        out = self.runner.execute_rows(step, x, ())
        rows[slots_, -1] = 1
        rows[sources, -1] = 1  # whose mark the model's pass has taken, if it was behind the last known token then
        return list(out[ends])

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def _grow(self, trees: list[_Growing], features: Tensor) -> None:
        """Add nodes, level by level. ``features`` [trees, H] are predicted behind the last known tokens."""
        parents = [[-1] for _ in trees]
        for t in trees:
            t.paths[-1] = (len(t.seq.tokens) - 1,)
        for level in range(1, max(t.levels for t in trees) + 1):
            self._add(trees, parents, features, level)
            going = [(i, t) for i, t in enumerate(trees) if level < t.levels]
            if not going:
                return
            chosen = [t.likeliest(self.branches) for _, t in going]
            where = {(i, node): row for row, (i, node) in enumerate((i, n) for i, p in enumerate(parents) for n in p)}
            sources = [where[i, t.nodes[n].parent] for (i, t), some in zip(going, chosen, strict=True) for n in some]
            features = self._read_nodes([t for _, t in going], chosen, features, sources)
            trees, parents = [t for _, t in going], chosen

    def _add(self, trees: list[_Growing], parents: list[list[int]], features: Tensor, level: int) -> None:
        """Add the likeliest tokens behind ``parents`` (nodes of each tree), whose rows are ``features`` [R, H]."""
        scores: list[list[float]] = []
        ids: list[list[int]] = []
        for some in features.split(self.rows_at_once):
            logits = self.target.logits(some)
            values, tokens = logits.topk(self.branches, dim=1)
            scores += (values - logits.logsumexp(1, keepdim=True)).tolist()
            ids += tokens.tolist()
        row = 0
        for t, behind in zip(trees, parents, strict=True):
            t.frontier = []
            for parent in behind:
                before = t.nodes[parent].score if parent >= 0 else 0.0
                for score, token in zip(scores[row], ids[row], strict=True):
                    t.frontier.append(len(t.nodes))
                    t.nodes.append(Candidate(before + score, level, parent, token))
                row += 1

    def _read_nodes(
        self, trees: list[_Growing], chosen: list[list[int]], features: Tensor, sources: list[int]
    ) -> Tensor:
        """Have the head read nodes behind their parents, whose features are rows ``sources`` of ``features`` → the
        features behind them, [R, H]."""
        step = PackedStep([])
        ids: list[int] = []
        for t, some in zip(trees, chosen, strict=True):
            start, paths = len(t.seq.tokens) + t.places, []
            for i, n in enumerate(some):
                t.paths[n] = (*t.paths[t.nodes[n].parent], start + i)
                paths.append(t.paths[n])
                ids.append(t.nodes[n].token)
            self.runner.add_rows(step, t.seq.blocks, start, paths)
        tokens, at, rows = upload(self.target.device, ids, step.at, sources)
        x = self.head.join(self.target.embed(tokens[None], at)[0], features[rows])
        return self.runner.execute_rows(step, x, ())
