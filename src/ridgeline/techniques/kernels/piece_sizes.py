"""Sizes of the pieces into which layers are split so that what is between two operators stays in cache (NLP-Fast's
model-driven configuration, doi:10.1109/PACT52795.2021.00013)."""

from __future__ import annotations

from ridgeline.graph.graph import Block
from ridgeline.spec.device import DTYPE_BYTES, Device

LEAST = 64
"""Rows, columns or keys that a piece has at least, where there are as many: smaller products are inefficient."""
_UNKNOWN = 4 << 20
"""Bytes of cache of a device that does not state them."""
KEYS = 512
"""Keys whose scores are computed at a time: enough for an efficient product."""


def cache_share(device: Device) -> float:
    """Bytes of a piece: half the last-level cache, so that the piece's operands have room too."""
    return (device.l2_bytes or _UNKNOWN) / 2


def feed_forward_piece(
    tokens: int, hidden: int, inner: int, factors: int, width: float, share: float
) -> tuple[int, int]:
    """(rows, columns) of a piece of the inner activations, [tokens, inner].

    Of all pieces of at most ``share`` bytes, counting ``factors`` tensors (gate and up), the one with the least memory
    traffic: each block of rows reads the weights again, each block of columns the input, and reads and writes the sum.
    """
    weights, activations = (1 + factors) * hidden * inner, 3 * tokens * hidden

    def traffic(piece: tuple[int, int]) -> tuple[float, int]:
        rows, columns = piece
        return weights * -(-tokens // rows) + activations * -(-inner // columns), -rows

    pieces = [(r, c) for r in _halves(tokens) for c in _halves(inner)]
    fitting = [(r, c) for r, c in pieces if r * c * factors * width <= share]
    return min(fitting, key=traffic) if fitting else min(pieces, key=lambda piece: piece[0] * piece[1])


def attention_piece(scores: int, queries: int, keys: int, width: float, share: float) -> tuple[int, int]:
    """(rows, keys) of a piece of the scores: ``scores`` of them (batch · heads) for each query and key.

    Scores and their exponentials take at most ``share`` bytes, as far as :data:`LEAST` rows and keys allow.
    """
    columns = min(keys, KEYS)
    most = share / (2 * scores * width)
    while columns > LEAST and columns * LEAST > most:
        columns = -(-columns // 2)
    return next((r for r in _halves(queries) if r * columns <= most), min(queries, LEAST)), columns


def _halves(size: int) -> list[int]:
    """``size``, its half, … down to :data:`LEAST`."""
    out = [size]
    while out[-1] >= 2 * LEAST:
        out.append(-(-out[-1] // 2))
    return out


def workspaces(b: Block) -> tuple[float, float]:
    """Temporary bytes of attention and of the feed-forward layer in a layer's forward."""
    attention = mlp = 0.0
    pieces = {o.name: o.pieces for o in b.forward}
    for o in b.forward:
        if o.name == "attention.scores":
            batch, queries, keys, _ = o.shape
            attention = 2.0 * batch * queries * keys * DTYPE_BYTES[o.dtype] / pieces["attention.softmax"]
        elif o.name == "mlp.up_proj":
            rows, inner, _ = o.shape
            mlp = 1.0 * rows * inner * DTYPE_BYTES[o.dtype] / pieces["mlp.act"]
    return attention, mlp
