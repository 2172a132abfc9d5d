"""From logits to tokens: penalties, biases, grammars, temperature, top-k, top-p, min-p; one uniform number a token.

A row's choice depends on its own logits and its own random numbers only, so an output with a seed is the same whatever
else is in the batch. Filters follow one another as in Hugging Face: temperature, top-k, top-p, min-p.

Shapes: R rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from ridgeline.nn.kernels import native
from ridgeline.serve import topk
from ridgeline.serve.changes import change, put
from ridgeline.serve.likelihoods import Search
from ridgeline.serve.request import Sampling
from ridgeline.serve.sequence import Sequence

CANDIDATES = 256
"""Number of likeliest tokens in which the nucleus is searched before the whole row is."""
WIDE_FOR = 16
"""Tokens of a sequence behind one whose nucleus was larger than its candidates, for which the whole row is searched
at once on a GPU: the device then takes what it needs, and the host is not asked."""
NOT_FINITE = -2
"""In the place of a token of logits that are not finite."""


def plain_search(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, by one pass of PyTorch's selection."""
    return x.topk(min(k, x.shape[1]), dim=1)


@dataclass
class Chosen:
    """The tokens of a batch, which may still be on their way from a device."""

    numbers: Tensor
    """int64: the tokens [R], then for each of the ``filtered`` rows whether its nucleus is larger than its
    candidates."""
    rows: int
    filtered: list[int] = field(default_factory=list)
    """Rows with top-k, top-p or min-p, where that may be."""
    seqs: list[Sequence] = field(default_factory=list)
    """Of those rows."""
    searched: frozenset[int] = frozenset()
    """Places in ``filtered`` of rows whose tokens are right however large their nuclei are."""
    again: Callable[[list[int]], list[int]] | None = None
    """Chooses for some of the others, by their places in ``filtered``, among the whole vocabulary."""

    def read(self, numbers: list[int]) -> tuple[list[int], set[int]]:
        """The tokens, given ``numbers`` on the host, and the rows of which ``numbers`` has other ones."""
        tokens, larger = numbers[: self.rows], numbers[self.rows :]
        for seq, more in zip(self.seqs, larger, strict=True):
            seq.wide = WIDE_FOR if more else max(0, seq.wide - 1)
        lacking = (n for n, more in enumerate(larger) if more and n not in self.searched)
        wide = [n for n in lacking if tokens[self.filtered[n]] != NOT_FINITE]
        if wide and self.again is not None:
            for n, token in zip(wide, self.again(wide), strict=True):
                tokens[self.filtered[n]] = token
        return tokens, {self.filtered[n] for n in wide}


class Sampler:
    """Chooses tokens. ``hierarchical``: by two-level search of the vocabulary; else by PyTorch's own operators."""

    def __init__(self, ends: frozenset[int], hierarchical: bool = True) -> None:
        self.ends, self.hierarchical = ends, hierarchical
        self.search: Search = topk.top_k if hierarchical else plain_search
        self.argmax = topk.argmax if hierarchical else (lambda x: x.argmax(1))

    def __call__(self, logits: Tensor, seqs: list[Sequence]) -> list[int]:
        """One token for each row of ``logits`` [R, V], which may be changed; :data:`NOT_FINITE` for a row without one.

        The host waits for the device once; once more where a nucleus is larger than its candidates and none was
        before.
        """
        uniform = draws(seqs)
        try:
            chosen = self.launch(logits, seqs, uniform)
            return chosen.read(chosen.numbers.tolist())[0]
        except Exception:
            give_back(seqs, uniform)
            raise

    def launch(
        self, logits: Tensor, seqs: list[Sequence], uniform: list[float], short: list[bool] | None = None
    ) -> Chosen:
        """The same without waiting for a device; ``uniform`` as :func:`draws` has it, ``short`` as :meth:`adjust`."""
        settings = [s.group.request.sampling for s in seqs]
        if self.hierarchical and logits.device.type == "cpu" and logits.dtype == torch.float32 and native.library():
            self.adjust(logits, seqs, short)
            return Chosen(torch.tensor(_by_kernel(logits, settings, uniform)), len(seqs))
        self.adjust(logits, seqs, short)
        finite = torch.isfinite(logits.amax(1))  # of what is left of a row
        kinds = [0 if s.greedy else 2 if _filters(s) else 1 for s in settings]
        parts, order = [], []
        chosen = Chosen(logits, len(seqs))
        for kind in sorted(set(kinds)):
            some = [i for i, k in enumerate(kinds) if k == kind]
            order += some
            rows = logits if len(some) == len(seqs) else logits[put(some, torch.int64, logits.device)]
            if kind == 0:
                parts.append(self.argmax(rows))
                continue
            numbers = put([uniform[i] for i in some], torch.float64, logits.device)
            x = rows / put([settings[i].temperature for i in some], logits.dtype, logits.device)[:, None]
            if kind == 1:
                parts.append(topk.draw(x, numbers))
            else:
                chosen.filtered, chosen.seqs = some, [seqs[i] for i in some]
                drawn, wide = self._filtered_by_need(chosen, x, [settings[i] for i in some], numbers)
                parts.append(drawn)
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        if order != sorted(order):
            tokens = torch.empty_like(tokens).index_copy_(0, put(order, torch.int64, logits.device), tokens)
        tokens = tokens.where(finite, NOT_FINITE)
        chosen.numbers = torch.cat([tokens, wide]) if chosen.filtered else tokens
        return chosen

    def adjust(self, logits: Tensor, seqs: list[Sequence], short: list[bool] | None = None) -> None:
        """Apply penalties, biases and constraints of the requests to rows of logits [R, V], in place. ``short``: whose
        output has fewer than ``min_tokens``; None: as the host knows them."""
        if some := [i for i, seq in enumerate(seqs) if _changes(seq)]:
            change(logits, seqs, some)
        if short is None:
            short = [seq.generated < seq.group.request.sampling.min_tokens for seq in seqs]
        if any(short):
            self._forbid_ends(logits, [i for i, below in enumerate(short) if below], seqs)

    def _forbid_ends(self, logits: Tensor, rows: list[int], seqs: list[Sequence]) -> None:
        """Let none of these rows of ``logits`` [R, V] choose a token that would end it."""
        ends = [tuple(sorted(self.ends | set(seqs[i].group.request.sampling.stop_token_ids))) for i in rows]
        if len(rows) == len(logits) and len(set(ends)) == 1:
            if ends[0]:
                logits.index_fill_(1, _held(ends[0], logits.device), float("-inf"))
            return
        places = [(i, token) for i, some in zip(rows, ends, strict=True) for token in some]
        if places:
            row, token = put(places, torch.int64, logits.device).unbind(1)
            logits[row, token] = float("-inf")

    def _filtered_by_need(
        self, chosen: Chosen, x: Tensor, settings: list[Sampling], uniform: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:meth:`_filtered`, whose rows ``chosen`` may ask for again, but for those that are expected to want more:
        these are drawn from the whole vocabulary where they do."""
        drawn, wide = self._filtered(x, settings, uniform)
        searched = [n for n, seq in enumerate(chosen.seqs) if seq.wide]
        if searched:
            at = put(searched, torch.int64, x.device)
            whole = self._whole(x[at], [settings[n] for n in searched], uniform[at])
            drawn = drawn.index_copy(0, at, whole.where(wide[at] > 0, drawn[at]))
        chosen.searched = frozenset(searched)
        if len(searched) < len(settings):
            chosen.again = partial(self._again, x, settings, uniform)
        return drawn, wide

    def _filtered(self, x: Tensor, settings: list[Sampling], uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draws from rows ``x`` [R, V] with top-k, top-p or min-p, by numbers ``uniform`` [R], among the likeliest
        candidates of all rows at once; and which rows want more of the vocabulary (0 or 1): both int64 [R]."""
        most = max([CANDIDATES, *(s.top_k for s in settings)])
        values, ids = self.search(x, most)
        width = values.shape[1]
        top_k, top_p, min_p = _columns(settings, x.device)
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
        more = ~some & (nucleus >= width) & (inside >= width)
        return chosen, more[:, 0].long() if width < x.shape[1] else torch.zeros_like(chosen)

    def _again(self, x: Tensor, settings: list[Sampling], uniform: Tensor, rows: list[int]) -> list[int]:
        """The tokens of some of the rows ``x`` of :meth:`_filtered`, among the whole vocabulary."""
        at = put(rows, torch.int64, x.device)
        found: list[int] = self._whole(x[at], [settings[n] for n in rows], uniform[at]).tolist()
        return found

    @staticmethod
    def _whole(x: Tensor, settings: list[Sampling], uniform: Tensor) -> Tensor:
        """Draws from rows ``x`` [R, V] with top-p or min-p among the whole vocabulary: [R]."""
        _, top_p, min_p = _columns(settings, x.device)
        whole = x.logsumexp(1, keepdim=True).double()
        p = (x.amax(1, keepdim=True).double() - whole).exp_()
        least = torch.maximum(min_p * p, torch.full_like(min_p, torch.finfo(torch.float64).tiny))
        kept = nuclei(x, whole, top_p.where(top_p < 1, 2.0), least)
        return topk.draw(x.masked_fill(~kept, float("-inf")), uniform)


def draws(seqs: list[Sequence]) -> list[float]:
    """The next random number of each sequence that needs one; 0 for the others."""
    return [0.0 if s.group.request.sampling.greedy else s.draw() for s in seqs]


def give_back(seqs: list[Sequence], uniform: list[float]) -> None:
    """Let numbers that :func:`draws` gave be the sequences' next ones again."""
    for seq, number in zip(seqs, uniform, strict=True):
        if not seq.group.request.sampling.greedy:
            seq.returned.insert(0, number)


def finite_rows(logits: Tensor) -> list[bool]:
    """Which rows of ``logits`` [R, V] have a token to choose: their largest is a finite number, and none is NaN."""
    if logits.is_cpu and logits.dtype == torch.float32 and native.library() is not None:
        return native.finite(logits.contiguous())
    good: list[bool] = torch.isfinite(logits.amax(1)).tolist()
    return good


def _by_kernel(logits: Tensor, settings: list[Sampling], uniform: list[float]) -> list[int]:
    """The same choices by the compiled kernel."""
    choices = [(0.0, 1.0, 0.0, 0.0, 0) if s.greedy else (s.temperature, s.top_p, s.min_p, number, s.top_k)
               for s, number in zip(settings, uniform, strict=True)]  # fmt: skip
    tokens = native.sample(logits.contiguous(), choices)
    if min(tokens) < 0:
        raise ValueError("no token is allowed")
    return tokens


def nuclei(x: Tensor, whole: Tensor, top_p: Tensor, least: Tensor) -> Tensor:
    """Which entries of rows ``x`` [R, V] are the likeliest ones that together reach ``top_p`` [R, 1] (above 1: all),
    each with a probability of ``least`` [R, 1] or more; ``whole`` [R, 1]: the log of each row's sum."""
    ordered, order = x.sort(dim=1, descending=True, stable=True)
    p = (ordered - whole.to(x.dtype)).exp_().double()
    before = p.cumsum(1) - p
    kept = (before < top_p) & (p >= least)
    return torch.zeros_like(kept).scatter_(1, order, kept)


@lru_cache(maxsize=64)
def _held(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """``ids`` on the device, copied once."""
    return put(ids, torch.int64, device)


def _columns(settings: list[Sampling], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """top-k, top-p and min-p of each row, [R, 1] in fp64."""
    k, p, least = put([(s.top_k, s.top_p, s.min_p) for s in settings], torch.float64, device).unsqueeze(2).unbind(1)
    return k.contiguous(), p.contiguous(), least.contiguous()


def _changes(seq: Sequence) -> bool:
    """Whether a request's sampling changes logits in other ways than by ``min_tokens``."""
    s = seq.group.request.sampling
    penalties = s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty
    return bool(penalties or s.logit_bias or s.allowed_token_ids or s.bad_words) or seq.grammar is not None


def _filters(s: Sampling) -> bool:
    return s.top_k > 0 or s.top_p < 1 or s.min_p > 0
