"""Tokens of the workload's text on several ranks: rank 0 makes them, the others read them from its cache."""

from __future__ import annotations

import time

import torch.distributed as dist

from ridgeline.data.batches import Tokens, cached_tokens, load_tokens

_LONGEST_SLEEP = 0.25
"""Seconds between two looks at who has arrived."""


def shared_tokens(source: str, vocab_size: int, tokenizer: str | None, rank: int, world: int) -> Tokens:
    """What :func:`load_tokens` returns of a whole source, on every rank.

    Rank 0 may take longer than the timeout of collectives. So may ranks that cannot read its cache (on other machines,
    or where nothing can be cached), which tokenize for themselves.
    """
    if world == 1:
        return load_tokens(source, vocab_size, tokenizer, whole=True)
    tokens = load_tokens(source, vocab_size, tokenizer, whole=True) if rank == 0 else None
    wait_for_all("tokenized", world)
    name = [tokens.cached if tokens else None]
    dist.broadcast_object_list(name)
    if tokens is None:
        tokens = cached_tokens(name[0] or "", source) or load_tokens(source, vocab_size, tokenizer, whole=True)
    wait_for_all("read", world)
    return tokens


def wait_for_all(name: str, world: int) -> None:
    """Return when every rank has called this, however long one takes.

    A collective has a timeout, because its ranks may be lost; here that is left to what started them, which ends the
    others when one ends.
    """
    store = dist.distributed_c10d._get_default_store()
    arrived = store.add(name, 1)
    needed = -(-arrived // world) * world  # of this call: every rank may call several times
    pause = 0.001
    while store.add(name, 0) < needed:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SLEEP)
