"""How long padded batches take, measured when the engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable

from ridgeline.runtime.batch_order import STEP, CostTable, grid
from ridgeline.serve.adapter_table import AdapterTable
from ridgeline.serve.block_manager import Blocks
from ridgeline.serve.request import EngineRequest
from ridgeline.serve.runner import Runner
from ridgeline.serve.sequence import Sequence, SequenceGroup
from ridgeline.spec.scheduling import Limits

SHORT = 0.1
"""Seconds below which a batch is measured twice; the shorter time counts."""
FULL = 0.85
"""Share of a proportional time from which on larger batches are taken to be in proportion."""


def measure_costs(runner: Runner, blocks: Blocks, limits: Limits, longest: int) -> CostTable:
    """Time batches of the engine that is about to start, as large as a step may be."""
    most = min(longest, limits.max_num_batched_tokens)
    if runner.graphs is not None:
        runner.graphs.warm_up_adapted()  # which would be captured while they are timed
    found: dict[tuple[int, int], float] = {}
    for length in [*grid(most), most]:
        before = 0.0
        for batch in grid(limits.max_num_seqs):
            if batch > 1 and length * batch > limits.max_num_batched_tokens:
                break
            seqs = [Sequence(SequenceGroup(EngineRequest("", [0] * length), 0), 0, [0] * length) for _ in range(batch)]
            if runner.keeps and any(blocks.grow(s, length) is None for s in seqs):
                seconds = None
            else:
                if not found:  # one-time setup must not count
                    _seconds(runner, seqs, length)
                seconds = _seconds(runner, seqs, length)
                if seconds < SHORT:
                    seconds = min(seconds, _seconds(runner, seqs, length))
            for s in seqs:
                blocks.release(s)
            if seconds is None:
                break
            found[length, batch] = seconds
            if before and seconds > FULL * STEP * before:
                break
            before = seconds
    return CostTable(found)


def measure_task(adapters: AdapterTable, shared: CostTable, measure: Callable[[], CostTable]) -> CostTable:
    """What the sequences of one task add to a batch, taken from a LoRA of rank 8 around every linear."""
    with adapters.probe():
        both = measure()
    return CostTable({
        (length, batch): max(0.0, both(length, batch) - shared(length, batch))
        for length in both.lengths for batch in both.batches
    })  # fmt: skip


def _seconds(runner: Runner, seqs: list[Sequence], length: int) -> float:
    start = time.perf_counter()
    runner.run([(s, length) for s in seqs], [])[-1].tolist()  # which waits for the device
    return time.perf_counter() - start
