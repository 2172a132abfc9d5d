"""The packed forward pass: one row of tokens, whoever they belong to (ByteTransformer's packing, arXiv:2210.03052)."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.nn.attention import LayerCache, Mask
from ridgeline.nn.paged import Layout, PagedCache, Piece
from ridgeline.nn.pass_memory import Forward
from ridgeline.nn.rotary import Rope
from ridgeline.nn.transformer import Transformer
from ridgeline.serve.blocks import Copy, runs
from ridgeline.serve.sequence import Sequence

NO_MASK = Mask(None, False)


class Runner:
    """A model and its pool of ``slots`` cache slots (0: an encoder, which keeps none)."""

    def __init__(
        self, model: Transformer, slots: int, block_size: int, max_model_len: int, kind: str = "",
        dtype: torch.dtype | None = None, padded: bool = False,
    ) -> None:  # fmt: skip
        """``kind``: fp8, int8 or int4 for a pool of codes; ``dtype``: of the pool otherwise (default: the weights').
        ``padded``: every sequence of a step takes as many rows as the longest, and all are computed."""
        spec, weight = model.spec, next(model.parameters())
        self.model, self.block_size, self.device = model, block_size, weight.device
        self.padded = padded
        self.forward: Forward = self._forward
        """The pass over a step's rows; a technique may put its own around it."""
        self.layout = Layout(causal=spec.causal, window=spec.sliding_window or 0)
        shape = (1, spec.num_kv_heads, slots, spec.head_dim)
        self.cache: dict[str, LayerCache] = {
            name: PagedCache(self.layout, shape, dtype or weight.dtype, self.device, kind) for name in model.layers
        }
        self.keeps = slots > 0
        self._tables: Rope | None = None
        if model.rotary is not None:
            self._tables = model.rotary.tables(None, 0, max_model_len, self.device, weight.dtype)

    @torch.inference_mode()
    def run(self, batch: list[tuple[Sequence, int]], copies: list[Copy]) -> Tensor:
        """Compute the next tokens of each sequence → what the head reads, [T, H], in the batch's order."""
        self._copy(copies)
        ids: list[int] = []
        at: list[int] = []
        slots: list[int] = []
        pieces: list[Piece] = []
        for seq, n in batch:
            start, stop = seq.n_computed, seq.n_computed + n
            known = len(seq.tokens)
            ids += seq.tokens[start:stop] if stop <= known else (seq.tokens + seq.draft)[start:stop]
            row = len(at)
            at += range(start, stop)
            pieces.append(self._piece(seq, row, start, stop, slots))
        layout = self.layout
        layout.slots = torch.tensor(slots, dtype=torch.long, device=self.device)
        layout.pieces = pieces
        new, places = torch.tensor(ids, device=self.device), torch.tensor(at, device=self.device)
        if not self.padded:
            return self.forward(new[None], places)
        counts = torch.tensor([n for _, n in batch], device=self.device)
        layout.real = torch.arange(self.rows(batch)[0], device=self.device) < counts[:, None]
        real = layout.real.flatten()
        wide = torch.zeros((2, len(real)), dtype=torch.long, device=self.device)  # a pad is token 0 at place 0
        wide[:, real] = torch.stack([new, places])
        return self.forward(wide[:1], wide[1])[real]

    def rows(self, batch: list[tuple[Sequence, int]]) -> list[int]:
        """Rows that each sequence of a step takes."""
        counts = [n for _, n in batch]
        return [max(counts)] * len(counts) if self.padded else counts

    def _piece(self, seq: Sequence, row: int, start: int, stop: int, slots: list[int]) -> Piece:
        n, size = stop - start, self.block_size
        if not self.keeps:
            return Piece(row, row + n, [], own=True)
        for first, count in runs(seq.blocks, size, start, stop):
            slots += range(first, first + count)
        window = self.layout.window
        seen = max(0, start + 1 - window) if window else 0
        own = n > 1
        return Piece(row, row + n, runs(seq.blocks, size, seen, start if own else stop), own)

    def _forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """``ids`` [1, T] at positions ``at`` [T] → [T, H]."""
        model = self.model
        assert model.embed is not None
        x = model.embed(ids, at[None], None)
        rope = None if self._tables is None else (self._tables[0][at], self._tables[1][at])
        for name, block in model.layers.items():
            x = block(x, NO_MASK, rope, self.cache[name])
        if model.norm is not None:
            x = model.norm(x)
        rows: Tensor = x[0]
        return rows

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """What the head makes of rows [R, H]: [R, V], in fp32 or wider."""
        assert self.model.head is not None
        out: Tensor = self.model.head(hidden)
        return out if out.dtype in (torch.float32, torch.float64) else out.float()

    def _copy(self, copies: list[Copy]) -> None:
        """Copy whole blocks; all are read before any is written."""
        if not copies:
            return
        size = torch.arange(self.block_size, device=self.device)
        pairs = torch.tensor(copies, device=self.device) * self.block_size
        source, target = ((pairs[:, i, None] + size).flatten() for i in range(2))
        for cache in self.cache.values():
            assert isinstance(cache, PagedCache)
            cache.copy(source, target)
