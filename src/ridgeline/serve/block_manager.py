"""The one manager of cache blocks: tables, reference counts, copy-on-write, prefix sharing (vLLM, arXiv:2309.06180).

A block is ``size`` consecutive slots of the pool. It is *blank* (unused), *held* (by ``refs`` tables) or *cached*
(unused, but its contents are identified by a chained hash and may be reused; the least recently freed goes first).

The allocator prefers neighbors: a sequence grows into the block behind its last one, and a new sequence starts in the
largest blank extent and lays claim to as much of it as it may grow to. Attention over few long extents needs no gather.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as List

import numpy as np

from ridgeline.nn.memory.block_store import BlockStore, Restoring
from ridgeline.serve.sequence import Sequence

Copy = tuple[int, int]
"""A block whose contents must be copied before the step: (from, to)."""


class Blocks:
    """``count`` blocks of ``size`` slots. ``share``: whether equal prefixes share blocks."""

    def __init__(self, count: int, size: int, share: bool = True) -> None:
        self.count, self.size, self.share = count, size, share
        self.refs = [0] * count
        self.key: list[bytes | None] = [None] * count
        self.by_key: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()
        self._epoch = b""
        """Differs after :meth:`reset`, so that nothing from before is found."""
        self.blank = np.ones(count, dtype=bool)
        self.blanks = count
        self.borrowed = 0
        self.claim = np.full(count, -1, dtype=np.int64)
        self.store: BlockStore | None = None
        """Where the contents of evicted blocks are kept."""
        self.coming: dict[int, bytes] = {}
        """Blocks, with their keys, whose contents the store brings when the next step begins (:meth:`restore`)."""

    @property
    def free(self) -> int:
        """Number of available blocks."""
        return self.blanks + len(self.cached)

    @property
    def used(self) -> int:
        """Number of blocks that sequences hold."""
        return self.count - self.free - self.borrowed

    def needed(self, tokens: int) -> int:
        """Number of blocks that hold this many tokens."""
        return -(-tokens // self.size)

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def find(self, seq: Sequence) -> int:
        """Tokens that :meth:`match` would find for a sequence without blocks, nothing of which is taken."""
        if not self.share:
            return 0
        most = (len(seq.tokens) - 1) // self.size
        self._hash(seq, most)
        found = next((i for i, key in enumerate(seq.keys[:most]) if key not in self.by_key), most)
        if self.store is not None:
            held = sum(not self.refs[self.by_key[key]] for key in seq.keys[:found])
            found += min(self.store.known(seq.keys[found:most]), self.free - held)
        return found * self.size

    def match(self, seq: Sequence) -> int:
        """Reuse the cached blocks that match the beginning of a sequence without blocks → tokens found. At least one
        token is left to compute, since its logits are needed."""
        if not self.share:
            return 0
        most = (len(seq.tokens) - 1) // self.size
        self._hash(seq, most)
        for key in seq.keys[:most]:
            block = self.by_key.get(key)
            if block is None:
                break
            if not self.refs[block]:
                del self.cached[block]
            self.refs[block] += 1
            seq.blocks.append(block)
        if self.store is not None:
            self._restore(seq, seq.keys[len(seq.blocks) : most], self.store)
        seq.committed = len(seq.blocks)
        seq.n_computed = seq.committed * self.size
        return seq.n_computed

    def _restore(self, seq: Sequence, keys: List[bytes], store: BlockStore) -> None:
        """Take blocks for the following keys that the store has; :meth:`restore` brings their contents."""
        keys = keys[: min(store.known(keys), self.free)]
        blocks: list[int] = []
        for _ in keys:
            last = blocks[-1] if blocks else seq.blocks[-1] if seq.blocks else -1
            blocks.append(self._take(seq, last))
        found = store.known(keys)  # those that were evicted for them may have taken their place
        for block in blocks[found:]:
            self.refs[block] = 0
            self._empty(block)
        for key, block in zip(keys, blocks[:found], strict=False):
            self.key[block], self.by_key[key], self.coming[block] = key, block, key
            seq.blocks.append(block)

    def restore(self) -> Restoring | None:
        """Begin to restore what the sequences of the next step took from the store; None if that is nothing."""
        for block in [b for b in self.coming if not self.refs[b]]:  # taken by one that did not join after all
            del self.cached[block]
            self._empty(block)
        if self.store is None or not self.coming:
            return None
        coming, self.coming = self.coming, {}
        return self.store.restore(coming.values(), coming.keys())

    def forget(self, blocks: Iterable[int]) -> None:
        """Let nobody find held blocks any more: their contents are not what they were taken for."""
        for block in blocks:
            self._forget(block)

    def commit(self, seq: Sequence) -> None:
        """Offer the blocks that became full of computed tokens for sharing."""
        if not self.share:
            return
        full = min(seq.n_computed, len(seq.tokens)) // self.size
        if full <= seq.committed:
            return
        self._hash(seq, full)
        for i in range(seq.committed, full):
            block, key = seq.blocks[i], seq.keys[i]
            if key not in self.by_key and self.key[block] is None:
                self.key[block], self.by_key[key] = key, block
        seq.committed = full

    def _hash(self, seq: Sequence, full: int) -> None:
        """Chained SHA-256 of the leading ``full`` blocks; the request's scope enters the first link."""
        size = self.size
        while len(seq.keys) < full:
            i = len(seq.keys)
            link = hashlib.sha256(seq.keys[-1] if i else self._epoch + seq.group.scope)
            link.update(array("q", seq.tokens[i * size : (i + 1) * size]).tobytes())
            seq.keys.append(link.digest())

    # ---- tables --------------------------------------------------------------------------------------------------

    def grow(self, seq: Sequence, tokens: int, expect: int = 0) -> list[Copy] | None:
        """Blocks for ``tokens`` tokens of a sequence, those it is about to write its own → copies to make first, or
        None if it would not fit (nothing has changed then). ``expect``: tokens that it may grow to."""
        size = self.size
        first = seq.n_computed // size
        shared = [i for i in range(first, len(seq.blocks)) if self.refs[seq.blocks[i]] > 1]
        missing = self.needed(tokens) - len(seq.blocks)
        if max(0, missing) + len(shared) > self.free:
            return None
        copies: list[Copy] = []
        for i in shared:
            block = self._take(seq, seq.blocks[i - 1] if i else -1)
            copies.append((seq.blocks[i], block))
            self.refs[seq.blocks[i]] -= 1
            seq.blocks[i] = block
        for _ in range(missing):
            if seq.blocks:
                seq.blocks.append(self._take(seq, seq.blocks[-1]))
            else:
                seq.blocks.append(self._start(seq, self.needed(max(tokens, expect))))
        return copies

    def shrink(self, seq: Sequence, tokens: int) -> None:
        """Give back a sequence's blocks behind those of ``tokens`` tokens; nothing in them is needed."""
        for _ in range(len(seq.blocks) - max(self.needed(tokens), seq.committed)):
            self._drop(seq.blocks.pop())

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share the blocks of ``parent`` with ``child``; the first to write copies."""
        child.blocks, child.keys = parent.blocks[:], list(parent.keys)
        child.n_computed, child.committed = parent.n_computed, parent.committed
        for block in child.blocks:
            self.refs[block] += 1

    def borrow(self, n: int) -> list[int] | None:
        """``n`` blocks for something other than the cache, or None; :meth:`give_back` returns them."""
        if n > self.free:
            return None
        out: list[int] = []
        for _ in range(n):
            at = _largest(self.blank)[0] if self.blanks else self._evict()
            out.append(self._hold(at))
        self.borrowed += n
        return out

    def give_back(self, blocks: List[int]) -> None:
        """Return borrowed blocks."""
        for block in blocks:
            self.refs[block] = 0
            self._empty(block)
        self.borrowed -= len(blocks)

    def release(self, seq: Sequence) -> None:
        """Release all blocks, the last first, so that prefixes stay cached longer than what follows them."""
        for block in reversed(seq.blocks):
            self._drop(block)
        seq.blocks, seq.n_computed, seq.committed = array("i"), 0, 0
        self.claim[self.claim == id(seq)] = -1

    def reset(self) -> int:
        """Forget all prefixes, also a store's; running sequences keep their blocks → how many are blank now."""
        freed = len(self.cached)
        while self.cached:
            self._empty(self.cached.popitem(last=False)[0])
        for block in list(self.by_key.values()):
            self._forget(block)
        self._epoch = secrets.token_bytes(16)
        return freed

    def close(self) -> None:
        """Save the cached blocks to the store, and close it."""
        if self.store is not None:
            for block in self.cached if self.store.persistent else ():
                key = self.key[block]
                if key is not None and block not in self.coming:
                    self.store.save(key, block)
            self.store.close()

    # ---- blocks --------------------------------------------------------------------------------------------------

    def _take(self, seq: Sequence, after: int) -> int:
        """A block for ``seq``, if possible the one behind ``after``."""
        nearest = after + 1
        if after >= 0 and nearest < self.count and self.blank[nearest] and self.claim[nearest] in (-1, id(seq)):
            return self._hold(nearest)
        return self._start(seq, 1)

    def _start(self, seq: Sequence, expect: int) -> int:
        """The first block of the largest unclaimed extent, which ``seq`` claims as far as it ``expect``s to grow."""
        if not self.blanks:
            return self._hold(self._evict())
        at, length = _largest(self.blank & (self.claim == -1))
        if not length:
            at, length = _largest(self.blank)
        self.claim[at : at + min(length, expect)] = id(seq)
        return self._hold(at)

    def _hold(self, block: int) -> int:
        if self.blank[block]:
            self.blank[block] = False
            self.blanks -= 1
        self.refs[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self.cached.popitem(last=False)
        key = self.key[block]
        if self.store is not None and key is not None and block not in self.coming:
            self.store.save(key, block)
        self._forget(block)
        return block

    def _drop(self, block: int) -> None:
        """One sequence less holds a block."""
        self.refs[block] -= 1
        if not self.refs[block]:
            if self.key[block] is None:
                self._empty(block)
            else:
                self.cached[block] = None

    def _forget(self, block: int) -> None:
        key = self.key[block]
        if key is not None:
            del self.by_key[key]
            self.key[block] = None
        self.coming.pop(block, None)

    def _empty(self, block: int) -> None:
        self._forget(block)
        self.blank[block] = True
        self.blanks += 1

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that every block is accounted for: tables against counts, states against each other."""
        refs = [0] * self.count
        for seq in sequences:
            assert len(set(seq.blocks)) == len(seq.blocks), "a table names a block twice"
            assert len(seq.blocks) >= self.needed(seq.n_computed), "computed tokens without blocks"
            for block in seq.blocks:
                refs[block] += 1
        held = sum(1 for r in self.refs if r)
        other = sum(r != s for r, s in zip(self.refs, refs, strict=True))
        assert other == self.borrowed, "counts differ from tables"
        assert held + self.blanks + len(self.cached) == self.count, "a block is lost"
        assert int(self.blank.sum()) == self.blanks
        assert all(not self.refs[b] and self.key[b] is not None and not self.blank[b] for b in self.cached)
        assert all(self.key[b] == k for k, b in self.by_key.items())
        assert sum(k is not None for k in self.key) == len(self.by_key)
        assert all(self.key[b] == k for b, k in self.coming.items())


def _largest(mask: np.ndarray) -> tuple[int, int]:
    """(start, length) of the longest run of True; length 0 if there is none."""
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def runs(blocks: List[int], size: int, start: int, stop: int) -> list[tuple[int, int]]:
    """Extents (first slot, slots) of the pool that hold tokens ``start`` to ``stop`` of a table, in order."""
    out: list[tuple[int, int]] = []
    i = start // size
    at = start
    while at < stop:
        first = blocks[i]
        slot = first * size + at - i * size
        j = i + 1
        while j * size < stop and blocks[j] == first + j - i:
            j += 1
        end = min(stop, j * size)
        out.append((slot, end - at))
        at, i = end, j
    return out
