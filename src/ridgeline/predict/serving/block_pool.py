"""The paged cache of a simulated serving engine: who holds how many blocks, and what is found again."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """State of one request."""

    index: int
    prompt: int
    tokens: int
    """The prompt and the tokens generated so far."""
    most: int
    """Number of tokens when it finishes."""
    computed: int = 0
    blocks: int = 0
    committed: int = 0
    """Number of leading blocks whose contents are known by their hash."""
    shared: int = 0
    """Bit i: block i of the shared prefix is one of its blocks."""
    order: int = -1
    """Admission number while it is running; otherwise -1."""
    offset: int = 0
    """While it decodes with the others: ``computed`` minus the counter of decode iterations."""
    last: float = math.nan
    """When it got its last token; nan: it has none yet. While it decodes with the others, when they took it in."""

    @property
    def decodes(self) -> bool:
        """Whether its prompt, and all of its tokens except the last, have been computed."""
        return self.tokens > self.prompt and self.tokens == self.computed + 1


class BlockPool:
    """Block counts: blank, in use, and cached with the oldest evicted first, as in the real pool. The first ``prefix``
    tokens of all prompts are the same."""

    def __init__(self, count: int, size: int, share: bool, prefix: int = 0) -> None:
        self.size, self.share, self.prefix = size, share, prefix
        self.blank = count
        self.cached: OrderedDict[SimulatedRequest | int, int] = OrderedDict()
        """Number of cached blocks of released sequences, the first of their own, of which the last are evicted first;
        and blocks of the shared prefix that no sequence holds, by their place in it."""
        self.kept = 0
        self.users: dict[int, int] = {}
        """Number of sequences that hold each block of the shared prefix whose contents are known."""

    @property
    def free(self) -> int:
        """Number of available blocks."""
        return self.blank + self.kept

    def needed(self, tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-tokens // self.size)

    def _in_prefix(self, job: SimulatedRequest) -> int:
        """Number of blocks of the shared prefix that a prompt has, which ends with a token of its own at least."""
        return min(self.prefix, job.prompt - 1) // self.size

    def find(self, job: SimulatedRequest) -> int:
        """Tokens that :meth:`match` would find, of which nothing is taken."""
        chain = self._in_prefix(job) if self.share else 0
        found = next((i for i in range(chain) if i not in self.users), chain)
        return self.size * (found + (self.cached.get(job, 0) if found == chain else 0))

    def match(self, job: SimulatedRequest) -> None:
        """Reuse what is left of the shared prefix, and behind it of a sequence's own cached blocks."""
        chain, found = (self._in_prefix(job) if self.share else 0), 0
        while found < chain and found in self.users:
            if not self.users[found]:
                self.kept -= self.cached.pop(found)
            self.users[found] += 1
            job.shared |= 1 << found
            found += 1
        if found == chain:
            own = self.cached.pop(job, 0)
            self.kept -= own
            found += own
        job.blocks = job.committed = found
        job.computed = found * self.size

    def commit(self, job: SimulatedRequest) -> None:
        """Register full blocks for reuse; of two that hold the same part of the shared prefix only the first."""
        if not self.share:
            return
        full = job.computed // self.size
        for i in range(job.committed, min(full, self._in_prefix(job)) if self.prefix else 0):
            if i not in self.users:
                self.users[i] = 1
                job.shared |= 1 << i
        job.committed = max(job.committed, full)

    def grow(self, job: SimulatedRequest, tokens: int) -> bool:
        """Allocate blocks for ``tokens`` tokens, if available."""
        missing = max(0, self.needed(tokens) - job.blocks)
        if missing > self.free:
            return False
        job.blocks += missing
        self.take(missing)
        return True

    def take(self, count: int) -> None:
        """Allocate blocks: blank ones first, then the oldest cached ones."""
        taken = min(count, self.blank)
        self.blank -= taken
        count -= taken
        while count:
            oldest, has = next(iter(self.cached.items()))
            taken = min(count, has)
            self.cached[oldest] -= taken
            self.kept -= taken
            count -= taken
            if taken == has:
                del self.cached[oldest]
                if isinstance(oldest, int):
                    del self.users[oldest]

    def release(self, job: SimulatedRequest) -> None:
        """Release a sequence's blocks, the last first."""
        before = self.cached.get(job, 0)  # found again only behind a whole prefix
        own = max(0, job.committed - (self._in_prefix(job) if self.prefix else 0) - before)
        self.blank += job.blocks - own - job.shared.bit_count()
        if own:
            self.cached[job] = before + own
            self.kept += own
        while job.shared:
            i = job.shared.bit_length() - 1
            job.shared ^= 1 << i
            self.users[i] -= 1
            if not self.users[i]:
                self.cached[i] = 1
                self.kept += 1
        job.blocks = job.committed = job.computed = 0
