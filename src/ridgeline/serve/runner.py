"""The packed forward pass: one row with the tokens of all sequences (ByteTransformer's packing, arXiv:2210.03052)."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from ridgeline.nn.adapters.lora_slots import LoraSlots
from ridgeline.nn.kernels import native
from ridgeline.nn.kernels.backends import Case, Kernels
from ridgeline.nn.kernels.dispatch import has_triton
from ridgeline.nn.kernels.lora_stack import Segment, cut
from ridgeline.nn.memory.block_store import Restoring
from ridgeline.nn.memory.cpu_paged_attention import cpu_paged_attention
from ridgeline.nn.memory.decoder import Decoder, Pool
from ridgeline.nn.memory.kv_pool import (
    BatchLayout,
    Kernel,
    PagedCache,
    Piece,
    Singles,
    StepKernel,
    first_seen,
    singles,
    table_of,
)
from ridgeline.nn.memory.pass_memory import Forward
from ridgeline.nn.memory.step_pages import Pages, Work, launches, upload
from ridgeline.nn.model.attention import LayerCache
from ridgeline.nn.model.mask import Mask, ScoreChanges, temperature
from ridgeline.nn.model.rotary import Rope
from ridgeline.nn.model.transformer import Transformer, TransformerBlock
from ridgeline.serve.block_manager import Copy, runs
from ridgeline.serve.draft_tree import tree_paths
from ridgeline.serve.sequence import Sequence
from ridgeline.serve.step_graphs import Size, StepGraphs
from ridgeline.spec.scheduling import WIDEST_HEAD

NO_MASK = Mask(None, False)


def find_kernel(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Attention of single new tokens over the pages of all sequences at once, where there is a kernel for it."""
    if device.type == "cpu" and dtype != torch.float64 and native.library() is not None:
        return cpu_paged_attention
    return None


def find_step_kernel(device: torch.device, width: int) -> StepKernel | None:
    """Our attention of all new tokens of a step, where there is a kernel for it and for heads of this ``width``."""
    if device.type == "cuda" and width <= WIDEST_HEAD and has_triton():
        from ridgeline.nn.kernels.paged_attention import paged_attention

        return paged_attention
    return None


def with_libraries(ours: StepKernel, kernels: Kernels, case: Case) -> StepKernel:
    """Attention of a step by the back ends that ``kernels`` takes, and by ``ours`` where they do not compute a layer:
    one that changes scores or attends in chunks, and of steps whose tables are of single slots."""
    from ridgeline.nn.kernels.attention_libraries import takes

    decode, prefill = (kernels.find(f"attention.{kind}", case) for kind in ("decode", "prefill"))
    if decode is None and prefill is None:
        return ours

    def attend(q: Tensor, keys: Any, values: Any, pages: Pages, window: int, changes: ScoreChanges | None) -> Tensor:
        theirs = decode if pages.decodes else prefill
        if theirs is None or pages.block != case.block or not takes(keys, window, changes):
            return ours(q, keys, values, pages, window, changes)
        out: Tensor = theirs(q, keys, values, pages, window)
        return out

    return attend


def _plain(block: nn.Module) -> TypeGuard[TransformerBlock]:
    """Whether a layer is the model's own, and nothing is done before or after it."""
    hooked = block._forward_hooks or block._forward_pre_hooks
    return type(block) is TransformerBlock and not hooked and "forward" not in vars(block)


@dataclass
class PackedStep:
    """One packed pass as plain numbers, which can be sent to other processes."""

    copies: list[Copy]
    """Blocks to copy first."""
    ids: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    """Position of each token in its sequence."""
    slots: list[int] = field(default_factory=list)
    """Slots for its keys and values."""
    pieces: list[Piece] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    """The kind of each token; empty: all are of kind 0."""
    late: list[int] = field(default_factory=list)
    """Rows whose token the host does not know yet; their ids are 0 until :attr:`tokens` are there."""
    sources: list[int] = field(default_factory=list)
    """For each of them, where in ``tokens`` it is."""
    tokens: Tensor | None = None
    """int64, on the device: what the step before has chosen."""
    segments: list[Segment] | None = field(default_factory=list)
    """The rows with an adapter in a slot; None: some have one that is in none."""
    graph: Size | None = None
    """The captured step that all ranks of a divided model replay; None: they launch its operators."""

    def fill(self, ids: Tensor) -> None:
        """Write the late tokens into ``ids`` [T] on the device; the host waits for nothing."""
        if not self.late or self.tokens is None:
            return
        tokens, n = self.tokens.clamp(min=0), len(self.late)  # below 0: an output that has failed
        if self.late == self.sources == list(range(n)):
            ids[:n].copy_(tokens[:n])
        else:
            rows, places = upload(ids.device, self.late, self.sources)
            ids.index_copy_(0, rows, tokens[places])


@dataclass
class Arranged:
    """A step as the device reads it."""

    ids: Tensor
    """[T], as ``at`` and ``kinds``; what a step does not have is empty."""
    at: Tensor
    kinds: Tensor
    slots: Tensor
    source: Tensor
    """Blocks to copy to ``target``."""
    target: Tensor
    items: Tensor
    """int32 [blocks, 3]: see :class:`~ridgeline.nn.adapters.lora_slots.LoraRows`."""
    pages: Pages | None
    singles: Singles | None


class Runner:
    """A model and its pool of ``slots`` cache slots (0: an encoder, which keeps none)."""

    def __init__(
        self, model: Transformer, slots: int, block_size: int, max_model_len: int, kind: str = "",
        kv_heads: int | None = None, padded: bool = False, kernels: Kernels | None = None,
    ) -> None:  # fmt: skip
        """``kind``: fp8, int8 or int4 for a pool of codes; ``kv_heads``: those that this rank holds, if not all.
        ``padded``: every sequence of a step takes as many rows as the longest, and all are computed. ``kernels``:
        chooses who computes attention."""
        spec, weight = model.spec, next(model.parameters())
        self.model, self.block_size, self.device = model, block_size, weight.device
        self.padded = padded
        self.compute: Forward = self.forward
        """The pass over a step's rows; a technique may put memory of its own around it."""
        window = (spec.sliding_window or 0) * (-1 if spec.chunked_window else 1)
        self.layout = BatchLayout(causal=spec.causal, window=window if spec.window_every == 1 else 0)
        self.layout.fused = model.backend.name == "flash"
        shape = (1, kv_heads or spec.cached_heads, slots, spec.cached_dim)
        self.cache: dict[str, LayerCache] = {
            name: PagedCache(
                self.layout,
                shape,
                weight.dtype,
                self.device,
                kind,
                window if block.windowed else 0,
                spec.cached_tensors,
            )
            for name, block in model.layers.items()
        }
        self.keeps = slots > 0
        self.kind = kind
        self.kernels = kernels or Kernels()
        if self.keeps and self.layout.fused:
            self.layout.kernel = find_kernel(self.device, weight.dtype)
            self.layout.whole = None if spec.is_latent else find_step_kernel(self.device, spec.cached_dim)
            if self.layout.whole is not None:
                from ridgeline.nn.kernels.paged_store import store_tokens

                self.layout.write = store_tokens
                case = Case(self.device, weight.dtype, width=spec.cached_dim, block=block_size, coded=bool(kind))
                self.layout.whole = with_libraries(self.layout.whole, self.kernels, case)
        self.beside: list[PagedCache] = []
        """What else is kept of a token in the slots of the pool's blocks."""
        self.after_pass: Callable[[PackedStep, Tensor], None] | None = None
        """Called with a step and what the head reads of it, [T, H]."""
        self.after_layer: Callable[[int], None] | None = None
        """Called when a layer has written its keys and values, with its number; not by the decoder below."""
        self.restoring: Restoring | None = None
        """Blocks that come into the pool during this step, each layer's before the layer needs them."""
        self.kinds: Tensor | None = None
        """The kind of each row of this step, [1, T]; None: all are of kind 0."""
        self.decoder: Decoder | None = None
        """All layers in one kernel, for steps of one new token for each sequence."""
        self.graphs: StepGraphs | None = None
        """Captured steps; None: every step is launched operator by operator."""
        self.slots: LoraSlots | None = None
        """Adapters that kernels add for all rows of a step at once."""
        self.route: Callable[[list[tuple[Sequence, int]], list[int]], list[Segment] | None] | None = None
        """Says which rows of a batch, as many of each sequence, have which slot: see :attr:`PackedStep.segments`."""
        self._described: Pool | None = None
        self._tables: dict[bool, Rope | None] = {  # of layers with a window and the others; one for all sequences:
            kind: model.rope(kind, None, 0, max_model_len, self.device, weight.dtype)  # scalings by length take the
            for kind in {bool(block.windowed) for block in model.layers.values()}  # longest that may come
        }

    def pool(self) -> list[list[Tensor]]:
        """The tensors of the pool, [1, G, slots, ·] each, by layer, and after these what else the blocks keep."""
        return [cache.tensors() for cache in self.paged()]

    def paged(self) -> list[PagedCache]:
        """What lies in the pool's blocks: the layers' keys and values, and what else is kept of a token."""
        return [*(c for c in self.cache.values() if isinstance(c, PagedCache)), *self.beside]

    def run(self, batch: list[tuple[Sequence, int]], copies: list[Copy]) -> Tensor:
        """Compute the next tokens of each sequence → what the head reads, [T, H], in the batch's order."""
        return self.execute(self.describe(batch, copies))

    def describe(self, batch: list[tuple[Sequence, int]], copies: list[Copy]) -> PackedStep:
        """A step as plain numbers."""
        step = PackedStep(copies)
        some = any(seq.group.request.token_types for seq, _ in batch)
        for seq, n in batch:
            start, stop = seq.n_computed, seq.n_computed + n
            if self._by_row(seq):
                step.ids += [seq.tokens[-1], *seq.draft]
                paths = tree_paths(start, seq.draft, seq.parents)
                self.add_rows(step, seq.blocks, start, paths)
                step.kinds += [0] * n if some else []
                continue
            if some:
                step.kinds += (seq.group.request.token_types or [0] * len(seq.tokens))[start:stop]
            known, row = len(seq.tokens), len(step.at)
            if stop > known and seq.pending:
                step.late.append(row + n - 1)
                step.ids += [*seq.tokens[start:], 0]
            else:
                step.ids += seq.tokens[start:stop] if stop <= known else (seq.tokens + seq.draft)[start:stop]
            step.at += range(start, stop)
            step.pieces.append(self.piece(seq, row, start, stop, step.slots))
        if self.route is not None:
            step.segments = self.route(batch, self.rows(batch))
        return step

    def rows(self, batch: list[tuple[Sequence, int]]) -> list[int]:
        """Number of rows of each sequence in a step."""
        counts = [n for _, n in batch]
        if not self.padded:
            return counts
        pieces = [n if self._by_row(seq) else 1 for seq, n in batch]
        widest = max(1 if p > 1 else n for p, n in zip(pieces, counts, strict=True))
        return [p * widest for p in pieces]

    def _by_row(self, seq: Sequence) -> bool:
        """Whether a sequence's drafts are pieces of one token each: those of a tree, and where a kernel takes many."""
        return bool(seq.draft) and (bool(seq.parents) or (self.layout.kernel is not None and not self.padded))

    def arrange(self, step: PackedStep) -> Arranged:
        """A step's numbers on the device, while the step before may still run."""
        layout, size, spec = self.layout, self.block_size, self.model.spec
        numbers: list[np.ndarray | list[int]] = [step.ids, step.at, step.kinds, step.slots]
        numbers += [[a for a, _ in step.copies], [b for _, b in step.copies]]
        numbers.append(np.array(cut(step.segments or [], len(step.ids)), dtype=np.int32).reshape(-1, 3))
        divided, counts, lengths = [], list[int](), np.empty(0, dtype=np.int32)
        if layout.whole is not None and step.pieces:
            counts = [p.stop - p.start for p in step.pieces]
            divided = launches(counts, spec.num_heads // spec.num_kv_heads, spec.cached_dim, self.kind)
            starts = np.array([step.pieces[0].start, *(p.stop for p in step.pieces)], dtype=np.int32)
            lengths = np.array([p.length for p in step.pieces], dtype=np.int32)
            table, size = table_of(step.pieces, size)
            numbers += [table, lengths, starts]
            numbers += [np.array(d.items, dtype=np.int32) for d in divided]
        ids, at, kinds, slots, source, target, items, *rest = upload(self.device, *numbers)
        pages = None
        if rest:
            work = tuple(Work(i, d.rows, d.used, d.split) for i, d in zip(rest[3:], divided, strict=True))
            pages = Pages(rest[0], rest[1], rest[2], size, work, counts, lengths.tolist())
        alone = singles(step.pieces, self.block_size, self.device) if layout.kernel is not None else None
        return Arranged(ids, at, kinds, slots, source, target, items, pages, alone)

    def _lay_out(self, step: PackedStep, arranged: Arranged | None = None) -> Arranged:
        """Copy blocks, and tell attention where everything is."""
        layout, found = self.layout, arranged or self.arrange(step)
        self._copy(found.source, found.target)
        layout.slots, layout.pieces, layout.pages = found.slots, step.pieces, found.pages
        layout.singles = found.singles
        if self.slots is not None:
            self.slots.rows.items = found.items if step.segments else None
        return found

    @torch.inference_mode()
    def execute_rows(self, step: PackedStep, x: Tensor, names: tuple[str, ...]) -> Tensor:
        """Do a step of hidden states [T, H] through the layers ``names`` alone → [T, H]."""
        return self.layers(x[None], self._lay_out(step).at, names)[0]

    @torch.inference_mode()
    def execute(self, step: PackedStep, arranged: Arranged | None = None) -> Tensor:
        """Do a step: copies, then the packed pass → what the head reads, [T, H]. The next step may overwrite it."""
        hidden = self._execute(step, arranged)
        if self.after_pass is not None:
            self._await(len(self.cache) + len(self.beside) - 1)
            self.after_pass(step, hidden)
        return hidden

    def captured(self, step: PackedStep) -> Size | None:
        """The captured step that is replayed for ``step``; None: its operators are launched."""
        graphs = self.graphs
        size = None if graphs is None else graphs.find(step)
        return size if graphs is not None and size is not None and graphs.ready(step, size) else None

    def _execute(self, step: PackedStep, arranged: Arranged | None) -> Tensor:
        if self.graphs is not None and (size := self.captured(step)) is not None:
            self._await(len(self.cache) - 1)
            return self.graphs.run(step, size)
        found = self._lay_out(step, arranged)
        ids, at = found.ids, found.at
        step.fill(ids)
        self.kinds = found.kinds[None] if step.kinds else None
        compute = self.compute if self.kinds is None else self.forward  # captured passes have one kind
        self.layout.real = None
        if not self.padded or len(step.pieces) == len(step.ids):  # a token of each sequence: there is nothing to pad
            return compute(ids[None], at)
        counts = np.array([p.stop - p.start for p in step.pieces])
        held = np.arange(counts.max()) < counts[:, None]
        (rows, sizes) = upload(self.device, np.flatnonzero(held), counts)
        self.layout.real = torch.arange(held.shape[1], device=self.device) < sizes[:, None]
        self.layout.rows = rows
        wide = torch.zeros((2, held.size), dtype=torch.long, device=self.device)  # padding is token 0 at place 0
        wide[:, rows] = torch.stack([ids, at])
        if self.kinds is not None:
            spread = torch.zeros_like(wide[:1])
            spread[:, rows] = self.kinds
            self.kinds = spread
        return compute(wide[:1], wide[1])[rows]

    def piece(self, seq: Sequence, row: int, start: int, stop: int, slots: list[int]) -> Piece:
        """Tokens ``start`` to ``stop`` of a sequence as the rows of a step from ``row`` on; their slots go to
        ``slots``."""
        n, size = stop - start, self.block_size
        if not self.keeps:
            return Piece(row, row + n, [], own=True)
        if n == 1 and self.layout.kernel is not None:  # which reads the table: extents are not needed
            slots.append(seq.blocks[start // size] * size + start % size)
            return Piece(row, row + 1, [], False, stop, seq.blocks)
        for first, count in runs(seq.blocks, size, start, stop):
            slots += range(first, first + count)
        if self.layout.whole is not None:  # which reads the pool
            return Piece(row, row + n, [], False, stop, seq.blocks)
        visible, own = first_seen(start, self.layout.window), n > 1
        return Piece(row, row + n, runs(seq.blocks, size, visible, start if own else stop), own, stop, seq.blocks)

    def add_rows(self, step: PackedStep, blocks: array[int], start: int, paths: list[tuple[int, ...]]) -> None:
        """Add tokens at the places of a sequence from ``start`` on to a step, each with its own ``path`` (as
        :attr:`Piece.path`): its position follows from the path's length."""
        size, window = self.block_size, self.layout.window
        row = len(step.at)
        for first, count in runs(blocks, size, start, start + len(paths)):
            step.slots += range(first, first + count)
        for i, path in enumerate(paths):
            length = path[0] + len(path)
            step.at.append(length - 1)
            inner = path if path[-1] != length - 1 else ()
            if self.layout.kernel is not None or self.layout.whole is not None:
                step.pieces.append(Piece(row + i, row + i + 1, [], False, length, blocks, inner))
                continue
            seen = first_seen(length - 1, window)
            extents = runs(blocks, size, seen, path[0])
            for place in path[max(0, seen - path[0]) :]:
                extents.append((blocks[place // size] * size + place % size, 1))
            step.pieces.append(Piece(row + i, row + i + 1, extents, False, length, blocks, inner))

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy what is kept in slots ``source`` to ``target``; all are read before any is written."""
        moved = upload(self.device, source, target)
        for cache in self.paged():
            cache.copy(moved[0], moved[1])

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """``ids`` [1, T] at positions ``at`` [T] → [T, H]."""
        x, update = self._through(self.embed(ids, at), at)
        return self.norm(x, update)[0]

    def embed(self, ids: Tensor, at: Tensor) -> Tensor:
        """What the first layer reads, [1, T, H]."""
        assert self.model.embed is not None
        x: Tensor = self.model.embed(ids, at[None], self.kinds)
        return x

    def layers(self, x: Tensor, at: Tensor, names: tuple[str, ...] = ()) -> Tensor:
        """The layers on this rank, or those of ``names``, [1, T, H] → [1, T, H]."""
        x, update = self._through(x, at, names)
        return x if update is None else x + update

    def _through(self, x: Tensor, at: Tensor, names: tuple[str, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """The same, with what the last layer adds apart."""
        decoder = None if names and len(names) < len(self.model.layers) else self.decoder
        s = self.layout.singles
        if decoder is not None and s is not None and len(s.rows) == x.shape[1] <= decoder.most_rows:
            if self._described is None:
                self._described = Pool.paged(c for c in self.cache.values() if isinstance(c, PagedCache))
            self._await(len(self.cache) - 1)
            rope = next(iter(self._tables.values()))
            return decoder(x[0], rope, at, self._described, s, self.layout.slots)[None], None
        ropes = {kind: None if t is None else (t[0][at], t[1][at]) for kind, t in self._tables.items()}
        scale = temperature(self.model.spec, at, 0, 0, at.device)
        scaled = NO_MASK if scale is None else NO_MASK._replace(scale=scale)
        update: Tensor | None = None
        for i, name in enumerate(names or self.model.layers):
            block = self.model.layers[name]
            kind = bool(block.windowed)
            self._await(i)
            given = NO_MASK if kind else scaled, ropes[kind], self.cache[name]
            if _plain(block):
                x, update = block.advance(x, update, *given)
            else:
                x, update = block(x if update is None else x + update, *given), None
            if self.after_layer is not None:
                self.after_layer(i)
        return x, update

    def _await(self, layer: int) -> None:
        """Have the blocks of a layer, and of those before it, in the pool."""
        if self.restoring is not None:
            self.restoring.wait(layer)

    def norm(self, x: Tensor, update: Tensor | None = None) -> Tensor:
        """The final norm, where the family has one, of the sum."""
        if update is not None and self.decoder is None and self.model.norm is not None:
            last = list(self.model.layers.values())[-1]
            assert isinstance(last, TransformerBlock)
            return last.add_norm(x, update, self.model.norm)[1]
        x = x if update is None else x + update
        known = None if self.decoder is None else self.decoder.norm(x[0])
        if known is not None:
            return known[None]
        out: Tensor = x if self.model.norm is None else self.model.norm(x)
        return out

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of rows [R, H]: [R, V], in fp32 or fp64."""
        assert self.model.head is not None
        known = None if self.decoder is None else self.decoder.logits(hidden)
        out: Tensor = self.model.head(hidden) if known is None else known
        return out if out.dtype in (torch.float32, torch.float64) else out.float()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks ``source`` [N] to ``target`` [N]; all are read before any is written."""
        if not len(source):
            return
        size = torch.arange(self.block_size, device=self.device)
        slots = [(blocks[:, None] * self.block_size + size).flatten() for blocks in (source, target)]
        for cache in self.paged():
            cache.copy(slots[0], slots[1])
