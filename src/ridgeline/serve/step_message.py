"""A packed step as bytes, for the other ranks of a divided model.

The layout is fixed: six int64 counts (tokens, slots, kinds, copies, pieces, extents), the four numbers of the captured
step that is replayed (zeros: none is), then int64 arrays of those counts in this order, and last the pieces' block
tables in int32.
"""

from __future__ import annotations

from array import array

import numpy as np

from ridgeline.nn.memory.kv_pool import Piece
from ridgeline.serve.runner import PackedStep
from ridgeline.serve.step_graphs import Size

_COUNTS, _PIECE = 6, 6
_NONE = Size(0, 0, 0, 0)


def pack(step: PackedStep) -> bytes:
    """The message of a step."""
    pieces, extents = step.pieces, [e for p in step.pieces for e in p.extents]
    each = [(p.start, p.stop, p.own, p.length, len(p.extents), len(p.blocks)) for p in pieces]
    counts = (len(step.ids), len(step.slots), len(step.kinds), len(step.copies), len(pieces), len(extents))
    arrays = (counts, step.graph or _NONE, step.ids, step.at, step.slots, step.kinds, step.copies, each, extents)
    return b"".join([*(np.array(a, dtype=np.int64).tobytes() for a in arrays), *(p.blocks for p in pieces)])


def unpack(message: bytes) -> PackedStep:
    """The step of a message."""
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        found = np.frombuffer(message, np.int64, int(np.prod(shape)), at).reshape(shape)
        at += found.nbytes
        return found

    tokens, slots, kinds, copies, pieces, extents = take(_COUNTS).tolist()
    graph = Size(*take(len(_NONE)).tolist())
    step = PackedStep([], take(tokens).tolist(), take(tokens).tolist(), take(slots).tolist())
    step.graph = None if graph == _NONE else graph
    step.kinds = take(kinds).tolist()
    step.copies = [(a, b) for a, b in take(copies, 2).tolist()]
    each, spans = take(pieces, _PIECE).tolist(), [(a, n) for a, n in take(extents, 2).tolist()]
    first = 0
    for start, stop, own, length, parts, blocks in each:
        table = array("i")
        table.frombytes(message[at : at + 4 * blocks])
        step.pieces.append(Piece(start, stop, spans[first : first + parts], bool(own), length, table))
        first, at = first + parts, at + 4 * blocks
    return step
