"""From logits to tokens: penalties, biases, grammars, temperature, top-k, top-p, min-p; one uniform number a token.

A row's choice depends on its own logits and its own random numbers only, so an output with a seed is the same whatever
else is in the batch. Filters follow one another as in Hugging Face: temperature, top-k, top-p, min-p.

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.nn.kernels import native
from ridgeline.serve import topk
from ridgeline.serve.request import Sampling, TokenLogprob
from ridgeline.serve.sequence import Sequence

Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]
CANDIDATES = 256
"""Number of likeliest tokens in which the nucleus is searched before the whole row is."""
_SHIFT, _BUCKETS = 20, 4096
"""Buckets of logits by their leading twelve bits: sign, exponent and three bits of the mantissa."""


def plain_search(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, by one pass of PyTorch's selection."""
    return x.topk(min(k, x.shape[1]), dim=1)


class Occurred:
    """The different tokens of one sequence, kept as it grows."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._ids = torch.empty(64, dtype=torch.int64)
        self._known = 0

    def ids(self, tokens: list[int]) -> Tensor:
        """The different ones of ``tokens``, which begin with those of the last call: [C], on the CPU."""
        new = list(dict.fromkeys(t for t in tokens[self._known :] if t not in self._seen))
        self._known = len(tokens)
        held = len(self._seen)
        if new:
            self._seen.update(new)
            if len(self._seen) > len(self._ids):
                self._ids = torch.cat([self._ids[:held], torch.empty(2 * len(self._seen) - held, dtype=torch.int64)])
            self._ids[held : len(self._seen)] = torch.tensor(new)
        return self._ids[: len(self._seen)]


class Sampler:
    """Chooses tokens. ``hierarchical``: by two-level search of the vocabulary; else by PyTorch's own operators."""

    def __init__(self, ends: frozenset[int], hierarchical: bool = True) -> None:
        self.ends, self.hierarchical = ends, hierarchical
        self.search: Search = topk.top_k if hierarchical else plain_search
        self.argmax = topk.argmax if hierarchical else (lambda x: x.argmax(1))

    def __call__(self, logits: Tensor, seqs: list[Sequence]) -> list[int]:
        """One token for each row of ``logits`` [R, V], which may be changed."""
        self.adjust(logits, seqs)
        if self.hierarchical and logits.device.type == "cpu" and logits.dtype == torch.float32 and native.library():
            return _by_kernel(logits, seqs)
        chosen = [0] * len(seqs)
        greedy = [i for i, s in enumerate(seqs) if s.group.request.sampling.greedy]
        if greedy:
            rows = logits if len(greedy) == len(seqs) else logits[greedy]
            for i, token in zip(greedy, self.argmax(rows).tolist(), strict=True):
                chosen[i] = token
        for filtered in (False, True):
            some = [
                i for i, s in enumerate(seqs)
                if not s.group.request.sampling.greedy and _filters(s.group.request.sampling) == filtered
            ]  # fmt: skip
            if some:
                settings = [seqs[i].group.request.sampling for i in some]
                uniform = torch.tensor([seqs[i].rng.random() for i in some], dtype=torch.float64, device=logits.device)
                temperature = torch.tensor([s.temperature for s in settings], dtype=logits.dtype, device=logits.device)
                x = logits[some] / temperature[:, None]
                drawn = self._filtered(x, settings, uniform) if filtered else topk.draw(x, uniform).tolist()
                for i, token in zip(some, drawn, strict=True):
                    chosen[i] = token
        return chosen

    def adjust(self, logits: Tensor, seqs: list[Sequence]) -> None:
        """Apply penalties, biases and constraints of the requests to rows of logits [R, V], in place."""
        for row, seq in zip(logits, seqs, strict=True):
            self._adjust(row, seq)

    def _adjust(self, row: Tensor, seq: Sequence) -> None:
        """Apply those of its request to one row of logits [V], in place."""
        s = seq.group.request.sampling
        if s.repetition_penalty != 1.0:
            seq.occurred = seq.occurred or Occurred()
            occurred = seq.occurred.ids(seq.tokens).to(row.device)
            values = row[occurred]
            row[occurred] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        if (s.presence_penalty or s.frequency_penalty) and seq.counts:
            ids = torch.tensor(list(seq.counts), device=row.device)
            often = torch.tensor(list(seq.counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= s.presence_penalty + s.frequency_penalty * often
        if s.logit_bias:
            ids = torch.tensor(list(s.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(s.logit_bias.values()), dtype=row.dtype, device=row.device)
        if s.allowed_token_ids:
            ids = torch.tensor(s.allowed_token_ids, device=row.device)
            kept = row[ids]
            row.fill_(float("-inf"))
            row[ids] = kept
        for *before, last in s.bad_words:
            if seq.generated >= len(before) and seq.tokens[len(seq.tokens) - len(before) :] == before:
                row[last] = float("-inf")
        if seq.generated < s.min_tokens:
            row[list(self.ends | set(s.stop_token_ids))] = float("-inf")
        if seq.grammar is not None:
            allowed = seq.grammar.allowed()
            if allowed is not None:
                ids = torch.as_tensor(allowed, device=row.device)
                kept = row[ids]
                row.fill_(float("-inf"))
                row[ids] = kept

    def _filtered(self, x: Tensor, settings: list[Sampling], uniform: Tensor) -> list[int]:
        """Draws from rows ``x`` [R, V] with top-k, top-p or min-p, by numbers ``uniform`` [R]: among the likeliest
        candidates of all rows at once, and among the whole vocabulary where a nucleus is larger."""
        most = max([CANDIDATES, *(s.top_k for s in settings)])
        values, ids = self.search(x, most)
        width = values.shape[1]

        def column(read: Callable[[Sampling], float]) -> Tensor:
            return torch.tensor([[read(s)] for s in settings], dtype=torch.float64, device=x.device)

        top_k, top_p, min_p = column(lambda s: s.top_k), column(lambda s: s.top_p), column(lambda s: s.min_p)
        some = top_k > 0
        place = torch.arange(width, device=x.device)
        ordered = values.double().masked_fill_(some & (place >= top_k), float("-inf"))
        whole = torch.where(some, ordered.logsumexp(1, keepdim=True), x.logsumexp(1, keepdim=True).double())
        p = (ordered - whole).exp_()
        upto = p.cumsum(1)
        least = torch.maximum(min_p * p[:, :1], torch.full_like(min_p, torch.finfo(torch.float64).tiny))
        inside = (p >= least).sum(1, keepdim=True)
        nucleus = torch.where(top_p < 1, torch.searchsorted(upto, top_p) + 1, width)
        keep = torch.minimum(nucleus, inside).clamp_(1, width)
        # The draw is in the order of the vocabulary.
        ids, order = ids.masked_fill(place >= keep, x.shape[1]).sort(1)
        upto = p.masked_fill_(place >= keep, 0).gather(1, order).cumsum(1)
        drawn = torch.searchsorted(upto, uniform[:, None] * upto[:, -1:], right=True)
        chosen = ids.gather(1, torch.minimum(drawn, keep - 1))[:, 0]
        if width < x.shape[1]:
            wide = (~some & (nucleus >= width) & (inside >= width))[:, 0].nonzero()[:, 0]
            if len(wide):
                kept = nuclei(x[wide], whole[wide], top_p.where(top_p < 1, 2.0)[wide], least[wide])
                chosen[wide] = topk.draw(x[wide].masked_fill_(~kept, float("-inf")), uniform[wide])
        return [int(t) for t in chosen.tolist()]

    def logprobs(self, logits: Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprob]:
        """Log-probabilities of one token for each row of unchanged ``logits`` [R, V], and of its likeliest ones."""
        whole = logits.logsumexp(1)
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0] - whole
        if not any(tops):
            return [TokenLogprob(t, p) for t, p in zip(tokens, chosen.tolist(), strict=True)]
        values, ids = self.search(logits, max(tops))
        values = values - whole[:, None]
        rows = zip(tokens, chosen.tolist(), ids.tolist(), values.tolist(), tops, strict=True)
        return [TokenLogprob(t, p, tuple(zip(i[:n], v[:n], strict=True))) for t, p, i, v, n in rows]

    @staticmethod
    def named(logits: Tensor, found: TokenLogprob, tokens: Iterable[int]) -> TokenLogprob:
        """``found`` of a row of unchanged ``logits`` [V]; its own token and ``tokens`` replace the likeliest."""
        ids = list(dict.fromkeys([found.token, *tokens]))
        values = logits[torch.tensor(ids, device=logits.device)] - logits.logsumexp(0)
        return replace(found, top=tuple(zip(ids, values.tolist(), strict=True)))


def _by_kernel(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """The same choices by the compiled kernel."""
    asked = [(s.group.request.sampling, s.rng) for s in seqs]
    choices = [(0.0, 1.0, 0.0, 0.0, 0) if s.greedy else (s.temperature, s.top_p, s.min_p, rng.random(), s.top_k)
               for s, rng in asked]  # fmt: skip
    tokens = native.sample(logits.contiguous(), choices)
    if min(tokens) < 0:
        raise ValueError("no token is allowed")
    return tokens


def nuclei(x: Tensor, whole: Tensor, top_p: Tensor, least: Tensor) -> Tensor:
    """Which entries of rows ``x`` [R, V] are the likeliest ones that together reach ``top_p`` [R, 1] (above 1: all),
    each with a probability of ``least`` [R, 1] or more; ``whole`` [R, 1]: the log of each row's sum.

    Without a sort: probabilities are added up by the leading twelve bits of the logits, and only the bucket in which a
    row reaches its limit is put in order.
    """
    p = (x - whole.to(x.dtype)).exp_()
    bits = x.float().view(torch.int32)
    bucket = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> _SHIFT).long() + _BUCKETS // 2  # in the order of the logits
    mass = torch.zeros(len(x), _BUCKETS, dtype=torch.float64, device=x.device).scatter_add_(1, bucket, p.double())
    above = mass.flip(1).cumsum(1).flip(1)  # of each bucket and those over it
    edge = ((above >= top_p).sum(1, keepdim=True) - 1).clamp_(min=0)
    kept = bucket > edge
    before = (above - mass).gather(1, edge)[:, 0].tolist()
    for row, (at, reached, limit) in enumerate(zip(edge[:, 0].tolist(), before, top_p[:, 0].tolist(), strict=True)):
        here = (bucket[row] == at).nonzero()[:, 0]
        order = here[x[row, here].argsort(descending=True, stable=True)]
        upto = p[row, order].double().cumsum(0) + reached
        kept[row, order[: int(torch.searchsorted(upto, limit)) + 1]] = True
    return kept & (p >= least)


def _filters(s: Sampling) -> bool:
    return s.top_k > 0 or s.top_p < 1 or s.min_p > 0
