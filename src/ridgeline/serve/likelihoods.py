"""Log-probabilities of tokens: computed on the device, read on the host, and how what the host asks for comes at once.

Shapes: R rows, V vocabulary, K likeliest tokens, N named ones, C numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.serve.changes import put
from ridgeline.serve.request import TokenLogprob

Search = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""The k largest of each row: values and indices, [R, k]."""
Taken = Callable[[list[float]], None]
HELD = 1 << 24
"""Most numbers that wait for one copy: 128 MB."""


@dataclass(frozen=True)
class Likelihoods:
    """Log-probabilities of one token of each of R rows, which may still be on a device."""

    numbers: Tensor
    """fp64 [R, C], which has tokens and numbers of 32 bits exactly: the token's own, those of the K likeliest, these,
    those of the N named ones, and its place among all if that is wanted."""
    tops: Sequence[int]
    """How many of the likeliest each row reports."""
    named: Sequence[Sequence[int]]
    """Tokens whose log-probabilities a row reports instead, behind its own."""
    most: int
    ranked: bool

    def read(self, tokens: Sequence[int], numbers: list[float]) -> list[TokenLogprob]:
        """Those of the rows, of which ``tokens`` [R] were chosen, given ``numbers`` [R · C] on the host."""
        columns, most, found = self.numbers.shape[1], self.most, []
        for i, (token, n, named) in enumerate(zip(tokens, self.tops, self.named, strict=True)):
            row = numbers[i * columns : (i + 1) * columns]
            n = min(n, most)  # of a vocabulary with fewer
            top = dict(zip(map(int, row[1 + most : 1 + most + n]), row[1 : 1 + n], strict=True))
            if named:
                values = dict(zip(named, row[1 + 2 * most :], strict=False))
                top = {token: row[0]} | {t: p for t, p in values.items() if t != token}
            found.append(TokenLogprob(token, row[0], tuple(top.items()), int(row[-1]) if self.ranked else 0))
        return found


def likelihoods(
    logits: Tensor, tokens: Tensor, tops: Sequence[int], search: Search, named: Sequence[Sequence[int]] = (),
    ranked: bool = False,
) -> Likelihoods:  # fmt: skip
    """Log-probabilities of ``tokens`` [R], one for each row of unchanged ``logits`` [R, V], of the likeliest ones
    (``tops`` of each row) or of the ones ``named`` by it, and, if ``ranked``, its place among all. The host does not
    wait; a row whose token is negative has any numbers."""
    named = named or [()] * len(tops)
    whole = logits.logsumexp(1, keepdim=True)
    own = logits.gather(1, tokens.clamp(min=0)[:, None])
    most, parts = max(tops), [own - whole]
    if most:
        values, ids = search(logits, most)
        most = values.shape[1]
        parts += [values - whole, ids]
    if width := max(map(len, named)):
        ids = put([[*some, *[0] * (width - len(some))] for some in named], torch.int64, logits.device)
        parts.append(logits.gather(1, ids) - whole)
    if ranked:
        parts.append(1 + (logits > own).sum(1, keepdim=True))
    return Likelihoods(torch.cat([p.double() for p in parts], 1), tops, named, most, ranked)


class OneCopy:
    """What the host asks for in a step, which comes in one copy: the host waits for the device once."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Taken]] = []
        self._held = 0

    def add(self, numbers: Tensor, take: Taken) -> None:
        """Have ``take`` called with ``numbers`` (any shape, int64 below 2^53, or floating), as a list, by the next
        :meth:`read`. The call reads if too much would be held otherwise."""
        if self._parts and self._held + numbers.numel() > HELD:
            self.read()
        self._parts.append((numbers.flatten(), take))
        self._held += numbers.numel()

    def read(self) -> None:
        """Wait for what was added, and hand it out, in that order."""
        parts, self._parts, self._held = self._parts, [], 0
        if not parts:
            return
        all_of = [t for t, _ in parts]
        values = (torch.cat([t.double() for t in all_of]) if len(parts) > 1 else all_of[0]).tolist()
        at = 0
        for t, take in parts:
            take(values[at : at + len(t)])
            at += len(t)
