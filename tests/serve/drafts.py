"""Drafts whose outcome is known, and heads for the small models of tests."""

from __future__ import annotations

import random

import torch

from ridgeline.nn.checkpoint.draft_head_files import save_head
from ridgeline.nn.model.draft_head import DraftHead
from ridgeline.serve.draft_tree import Draft
from ridgeline.serve.drafting import Drafting


class Oracle:
    """Trees of which one path is what comes next, among wrong ones. Not in the order of that path, so that what is kept
    has to be moved."""

    def __init__(self, truth, vocab, seed=0, wrong=2, right=0.8):
        """``truth``: (request, output) → its tokens; ``right``: how often the next one is among a node's children."""
        self.truth, self.vocab, self.wrong, self.right = truth, vocab, wrong, right
        self.rng, self.moved = random.Random(seed), 0

    def __call__(self, seqs, most):
        return [self.tree(s, n) for s, n in zip(seqs, most, strict=True)]

    def tree(self, seq, most):
        rng, after = self.rng, self.truth[seq.group.request.id, seq.index][seq.generated : seq.generated + most]
        tokens, parents, level = [], [], [(-1, True)]
        for token in after:
            below = []
            for node, good in level:
                found = {rng.randrange(self.vocab) for _ in range(self.wrong)} - {token}
                keep = good and rng.random() < self.right
                children = [*((t, False) for t in sorted(found)), *([(token, True)] if keep else [])]
                rng.shuffle(children)
                for t, right in children:
                    tokens.append(t)
                    parents.append(node)
                    below.append((len(tokens) - 1, right))
            level = below if len(below) <= 12 else [b for b in below if b[1]] + below[:4]
            level = sorted(set(level))
        return Draft(tokens, parents)


def drafted_by(eng, propose, most=4):
    """The engine with drafts from ``propose`` in every step."""
    eng.drafter = Drafting(propose, most)
    eng.drafter.tokens = lambda running: most if running else 0
    return eng


def always(eng):
    """The engine with its own drafter in every step."""
    most = eng.drafter.most
    eng.drafter.tokens = lambda running: most if running else 0
    return eng


def untrained(made, folder, seed=3):
    """A head with random weights for ``made``, sharpened, and the folder that it is saved in."""
    like = next(made.parameters())
    head = DraftHead.empty(made.spec, "cpu", like.dtype)
    head.init(seed)
    with torch.no_grad():
        for p in head.parameters():
            if p.dim() > 1:
                p.mul_(4)
    save_head(folder, made.spec, head.state_dict())
    return head
