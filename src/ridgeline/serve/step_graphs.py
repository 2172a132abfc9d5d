"""Steps as CUDA graphs: captured once for some numbers of tokens, sequences and blocks, then replayed by one launch.

A replay reads its numbers (tokens, positions, slots, lengths, block tables, what programs of attention take) from
buffers that stay where they are; the host fills a pinned copy of them and sends it in one piece. Steps of one new token
for each sequence and steps with prompts have graphs of their own. A step smaller than its graph is padded: to a decode
step come sequences of one token each, to a step with prompts comes one sequence with the missing tokens. Padding is
written to a block that no sequence has, and nothing reads what is computed of it.

Steps with adapters in slots have graphs of their own, which also read whose rows are whose. They are captured with the
adapters that a server starts with; else each when the first such step comes, and again when the adapters' tensors have
moved.

The graphs of steps with prompts share their numbers, as only one of them runs at a time. Their tables are the widest,
of which a step sends what it has, one row behind the other, and a kernel moves the rows to their places.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.nn.kernels.lora_stack import Segment, cut, most_cut
from ridgeline.nn.memory.kv_pool import Piece
from ridgeline.nn.memory.step_pages import Pages, Work, fewest_rows, launches, most_rows
from ridgeline.nn.model.moe import most_tokens_at_once
from ridgeline.spec.scheduling import (
    CAPTURED_SEQUENCES,
    FEW_DECODING,
    FEW_ROWS,
    Limits,
    captured_prompts,
    captured_tokens,
    divides_far_keys,
)

if TYPE_CHECKING:
    from ridgeline.serve.runner import PackedStep, Runner

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Runs a function and captures what it launches → (a call that launches the same again, the result that this fills)."""
BATCHES: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, CAPTURED_SEQUENCES)
"""Sequences of the captured decode steps, up to the most of a step."""
FIRST_RUNS = 2
"""Runs of a step before it is captured."""
NARROWEST, WIDER = 64, 4
"""Blocks of a sequence in a decode step's narrowest captured table, and how much wider the next one is."""
ALIGNED = 16
"""Bytes at a multiple of which the numbers of each kind begin: kernels are compiled for addresses of this kind."""


class Size(NamedTuple):
    """What a captured step has room for."""

    tokens: int
    decoding: int
    """Sequences whose keys attention splits over programs: of one new token, or of a draft and one more."""
    prompts: int
    """Others; 0: of a decode step."""
    blocks: int
    """Of a sequence."""


class CudaCapture:
    """Captures on a GPU; all graphs share the memory of their temporaries, as only one runs at a time."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream = torch.cuda.Stream()
        """One for all: what PyTorch has allocated for a stream, it keeps for that."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Run, then capture."""
        self.run_first(run)
        return self.record(run)

    def run_first(self, run: Callable[[], Tensor]) -> None:
        """Run :data:`FIRST_RUNS` times beside the main stream, so that kernels are compiled, libraries have their
        memory, and sums over ranks are connected."""
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            for _ in range(FIRST_RUNS):
                run()
        main.wait_stream(self.stream)

    def record(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture what was run."""
        main, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            # PyTorch has threads that ask for events of earlier sums over ranks.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                out = run()
        except Exception:
            torch.cuda.set_stream(main)  # PyTorch leaves that of a capture that fails in place
            raise
        self.pool = self.pool or graph.pool()
        return graph.replay, out


@dataclass
class _Host:
    """The host's copy of what a replay reads."""

    whole: Tensor
    rows: np.ndarray
    """int64 [3, T]: tokens, positions, slots."""
    lengths: np.ndarray
    """int32 [B]."""
    starts: np.ndarray
    """int32 [B + 1]: the first row of each sequence."""
    items: np.ndarray
    """int32 [W, 2]: see :class:`ridgeline.nn.memory.step_pages.Launch`."""
    segments: np.ndarray
    """int32 [blocks of rows, 3]: see :class:`ridgeline.nn.adapters.lora_slots.LoraRows`."""
    table: np.ndarray
    """int32 [B, blocks]; in a step with prompts rows are as long as it needs, and lie one behind the other."""
    sent: Any = None
    """Recorded behind its last copy to the device."""

    def free(self) -> None:
        """Wait until the last copy has read the numbers: they are about to change. It has, where the tokens of its step
        were waited for."""
        if self.sent is not None and not self.sent.query():
            self.sent.synchronize()


class _Numbers:
    """What a replay reads, on the device, where its address never changes; and two copies on the host, so that one can
    be filled while the other is on its way."""

    def __init__(self, size: Size, sequences: int, items: int, cuts: int, device: torch.device) -> None:
        """Of ``sequences``, for each of which ``size`` says how many blocks its table has. ``cuts``: blocks of rows
        with adapters."""
        counts = (3 * size.tokens, sequences, sequences + 1, 2 * items, 3 * cuts, sequences * size.blocks)
        used = [n * (4 if i else 8) for i, n in enumerate(counts)]  # only the first ones have 8 bytes each
        parts = [-(-n // ALIGNED) * ALIGNED for n in used]
        self.before = sum(parts[:-1])
        """Bytes before the tables."""
        self.hosts = [self._host(parts, used, sequences, device) for _ in range(2)]
        self.device = torch.zeros(sum(parts), dtype=torch.uint8, device=device)
        rows, *others = (t[:n] for t, n in zip(self.device.split(parts), used, strict=True))
        self.rows = rows.view(torch.int64).view(3, -1)
        self.lengths, self.starts, items_, segments, self.tables = (t.view(torch.int32) for t in others)
        self.items, self.segments = items_.view(-1, 2), segments.view(-1, 3)
        self.table = self.tables.view(sequences, -1)
        self.partly = size.prompts > 0
        """Whether a part of the tables is sent, and moved to its place then."""
        if self.partly:
            self.table = torch.zeros_like(self.table)

    @staticmethod
    def _host(parts: list[int], used: list[int], sequences: int, device: torch.device) -> _Host:
        whole = torch.from_numpy(np.zeros(sum(parts), dtype=np.uint8))
        whole = whole.pin_memory() if device.type == "cuda" else whole
        rows, *others = (a[:n] for a, n in zip(np.split(whole.numpy(), np.cumsum(parts)[:-1]), used, strict=True))
        lengths, starts, items, segments, table = (a.view(np.int32) for a in others)
        return _Host(whole, rows.view(np.int64).reshape(3, -1), lengths, starts, items.reshape(-1, 2),
                     segments.reshape(-1, 3), table.reshape(sequences, -1))  # fmt: skip

    def next(self) -> _Host:
        """The copy to fill."""
        self.hosts.reverse()
        self.hosts[0].free()
        return self.hosts[0]

    def send(self, host: _Host, sequences: int, blocks: int) -> None:
        """Copy it to the device, with the tables of ``sequences``, each of ``blocks``; the host does not wait."""
        device, whole, used = self.device, host.whole, sequences * blocks
        if self.partly:
            end = self.before + 4 * used
            device, whole = device[:end], whole[:end]
        device.copy_(whole, non_blocking=True)
        if device.is_cuda:
            host.sent = host.sent or torch.cuda.Event()
            host.sent.record()
        if self.partly:
            self.table[:sequences, :blocks].copy_(self.tables[:used].view(sequences, blocks))


@dataclass
class _Graph:
    """A captured step."""

    numbers: _Numbers
    pages: Pages
    """What a replay reads beside them: a graph does not keep the memory that it reads."""
    replay: Callable[[], object]
    out: Tensor
    """[T, H]: what the head reads."""


class StepGraphs:
    """The captured steps of a runner. ``pad``: the block of padding."""

    def __init__(
        self, runner: Runner, pad: int, limits: Limits, longest: int, make: Callable[[], Capture], drafts: int = 0
    ) -> None:
        """``longest``: tokens of a sequence; ``make``: makes what captures; ``drafts``: tokens of a draft."""
        spec, most = runner.model.spec, limits.max_num_seqs
        self.runner, self.pad, self.make = runner, pad, make
        self.failure: type[RuntimeError] = RuntimeError
        """What says that a step cannot be captured, so that its operators are launched."""
        self.repeat = spec.num_heads // spec.num_kv_heads
        self.most_rows = most_rows(spec.cached_dim, runner.kind)
        """Of a program that takes a prompt's."""
        self.few = min(1 + drafts, FEW_ROWS // self.repeat)
        """Most new tokens of a sequence whose keys are split, in a step with prompts."""
        at_once = most_tokens_at_once(runner.model)  # of more, the host would wait for the experts' numbers of rows
        self.batches = [b for b in sorted({min(b, most) for b in BATCHES}) if b <= at_once]
        self.widths, need = [NARROWEST], -(-longest // runner.block_size)
        while self.widths[-1] < need:
            self.widths.append(self.widths[-1] * WIDER)
        self.widths[-1] = min(self.widths[-1], need)
        self.decode_sizes = [Size(b, b, 0, w) for w in self.widths for b in self.batches]
        self.prompt_sizes = [s for s in self._prompt_sizes(limits) if s.tokens <= at_once]
        self.graphs: dict[Size, _Graph] = {}
        self.adapted: dict[Size, _Graph | None] = {}
        """Those of steps with adapters in slots; None: it cannot be captured."""
        self._version = 0
        """Of the slots' tensors, which they read."""
        self._capture: Capture | None = None
        self._shared: dict[bool, _Numbers] = {}
        """The numbers of steps with prompts, without adapters and with them."""
        self._out: Tensor | None = None
        """[T, H]: what such a step computes. A graph's own results stay in memory for as long as it does."""

    def _prompt_sizes(self, limits: Limits) -> list[Size]:
        """The smallest first."""
        if limits.padded:  # their rows are spread for every step anew
            return []
        found = []
        for tokens in captured_tokens(limits.max_num_batched_tokens):
            most = min(limits.max_num_seqs, CAPTURED_SEQUENCES, tokens)
            blocks = max(self.widths[-1], -(-tokens // self.runner.block_size))  # all of it may be padding
            prompts = min(most, captured_prompts(tokens)) if self.few else most
            for decoding in sorted({0, min(FEW_DECODING, most), most}) if self.few else [0]:
                found.append(Size(tokens, decoding, prompts, blocks))
        return [s._replace(blocks=found[-1].blocks) for s in found]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture them all, the largest first: the memory of its temporaries is enough for the others. Where steps with
        prompts cannot be captured, they are launched operator by operator."""
        capture = self.make()
        try:
            for size in reversed(self.prompt_sizes):
                self.graphs[size] = self._captured(size, capture, 0)
        except self.failure as e:
            warnings.warn(f"steps with prompts run without CUDA graphs: {str(e).splitlines()[0]}", stacklevel=2)
            self.graphs, self.prompt_sizes, self._shared, self._out = {}, [], {}, None
            capture = self.make()
        for size in reversed(self.decode_sizes):
            self.graphs[size] = self._captured(size, capture, 0)
        self._capture = capture

    def find(self, step: PackedStep) -> Size | None:
        """The captured step that ``step`` can be a part of: new tokens of some sequences, nothing beside."""
        n, tokens = len(step.pieces), len(step.ids)
        if step.copies or step.kinds or step.segments is None or not n or any(p.path for p in step.pieces):
            return None
        size = self._find_with_prompts(step, tokens) if tokens > n else self._find_decoding(step, n)
        return size if size is None or not step.segments or self._has_adapted(size) else None

    def _find_decoding(self, step: PackedStep, n: int) -> Size | None:
        if not self.batches or n > self.batches[-1]:
            return None
        blocks = -(-max(p.length for p in step.pieces) // self.runner.block_size)
        batch = self.batches[bisect_left(self.batches, n)]
        return Size(batch, batch, 0, self.widths[bisect_left(self.widths, blocks)])

    def _find_with_prompts(self, step: PackedStep, tokens: int) -> Size | None:
        if self.runner.restoring is not None:  # layer by layer, the first of which need not wait for the last
            return None
        sequences = [(p.stop - p.start, p.length) for p in step.pieces]
        if divides_far_keys(sequences, self.few, self.repeat):
            return None
        decoding = sum(n <= self.few for n, _ in sequences)
        prompts = len(step.pieces) - decoding
        fit = (s for s in self.prompt_sizes if s.tokens >= tokens and s.decoding >= decoding and s.prompts >= prompts)
        return next(fit, None)

    def _has_adapted(self, size: Size) -> bool:
        """Whether a step with adapters can be captured, as far as that is known."""
        slots = self.runner.slots
        if slots is None:
            return False
        if slots.version != self._version:
            self.adapted, self._version = {}, slots.version
            self._shared.pop(True, None)
        return self.adapted.get(size, size) is not None

    @torch.inference_mode()
    def ready(self, step: PackedStep, size: Size) -> bool:
        """Whether there is a graph for a step, which is captured now if it has adapters and is the first of its size.
        The model must have them already."""
        return not step.segments or self._capture_adapted(size)

    @torch.inference_mode()
    def warm_up_adapted(self) -> None:
        """Capture the steps with the adapters that are loaded, until one cannot be."""
        if self.runner.slots is None or not self.runner.slots.slot:
            return
        self.runner.slots.install()
        for size in reversed([*self.decode_sizes, *self.prompt_sizes]):
            if self._has_adapted(size) and not self._capture_adapted(size):
                break
        torch.cuda.empty_cache()  # of what was run beside the main stream before it was captured

    def _capture_adapted(self, size: Size) -> bool:
        """Whether there is a graph of this size for steps with adapters, which is captured if it was not yet."""
        if size not in self.adapted:
            try:
                self._capture = self._capture or self.make()
                self.adapted[size] = self._captured(size, self._capture, self._cuts(size))
            except RuntimeError as e:
                self._capture, self.adapted[size] = None, None
                warnings.warn(f"steps with adapters run without CUDA graphs: {str(e).splitlines()[0]}", stacklevel=2)
        return self.adapted[size] is not None

    def _cuts(self, size: Size) -> int:
        """Blocks of rows with adapters that a step of this size may have."""
        assert self.runner.slots is not None
        return most_cut(size.tokens, min(self.runner.slots.count, size.decoding + size.prompts))

    def run(self, step: PackedStep, size: Size) -> Tensor:
        """Do a step by its graph → [T, H], which the next step overwrites."""
        graph = self.adapted[size] if step.segments else self.graphs[size]
        assert graph is not None
        self._send(graph.numbers, size, [step.ids, step.at, step.slots], step.pieces, step.segments or [])
        step.fill(graph.numbers.rows[0])
        graph.replay()
        return graph.out[: len(step.ids)]

    def _send(
        self, numbers: _Numbers, size: Size, rows: list[list[int]], pieces: Sequence[Piece], segments: list[Segment]
    ) -> None:
        """Send a step's numbers and those of its padding. ``rows``: tokens, positions and slots; ``segments``: whose
        adapters they have."""
        host, tokens, block = numbers.next(), len(rows[0]), self.runner.block_size
        host.rows[0, :tokens], host.rows[1, :tokens], host.rows[2, :tokens] = rows
        host.lengths[: len(pieces)] = lengths = [p.length for p in pieces]
        table = self._divide(host, size, pieces, max(lengths, default=1)) if size.prompts else self._pad(host, tokens)
        for i, piece in enumerate(pieces):
            n = -(-lengths[i] // block)
            table[i, :n] = np.frombuffer(piece.blocks, dtype=np.int32, count=n)
        if len(host.segments):
            found = cut(segments, size.tokens)
            host.segments[len(found) :] = 0
            if found:
                host.segments[: len(found)] = found
        numbers.send(host, *table.shape)

    def _pad(self, host: _Host, n: int) -> np.ndarray:
        """Sequences from ``n`` on of a decode step are padding: token 0 at place 0 of a sequence of one → the tables,
        [B, blocks]."""
        table = host.table
        host.rows[:2, n:] = 0
        host.rows[2, n:] = self.pad * self.runner.block_size
        host.lengths[n:] = 1
        table[n:, 0] = self.pad
        return table

    def _divide(self, host: _Host, size: Size, pieces: Sequence[Piece], longest: int) -> np.ndarray:
        """Say which rows are whose in a step with prompts, with sequences of up to ``longest`` tokens → the tables of
        all sequences but empty ones, [n + 1, blocks].

        Behind the step's sequences comes one of padding. Its tokens are 0 at place 0, and are written to the padding's
        block in turn, so that all that they see was written. What else there is room for is empty; items that are not
        needed name the last one, which always is.
        """
        n, block, spec = len(pieces), self.runner.block_size, self.runner.model.spec
        tokens = pieces[-1].stop if pieces else 0
        pads, empty = size.tokens - tokens, size.decoding + size.prompts + 1
        host.rows[:2, tokens : size.tokens] = 0
        host.rows[2, tokens : size.tokens] = self.pad * block + np.arange(pads) % block
        host.starts[:n] = [p.start for p in pieces]
        host.starts[n], host.starts[n + 1 : empty + 2] = tokens, size.tokens
        host.lengths[n], host.lengths[n + 1 : empty + 1] = pads, 0
        counts = [p.stop - p.start for p in pieces]
        divided = launches(counts, self.repeat, spec.cached_dim, self.runner.kind, self.few * self.repeat)
        decoding, prompts = ([i for d in divided if d.split == split for i in d.items] for split in (True, False))
        prompts += [(n, first) for first in range(0, pads * self.repeat, self.most_rows)]
        for place, found in zip(self._places(size), (decoding, prompts), strict=True):
            items = host.items[place]
            items[len(found) :] = empty, 0
            if found:
                items[: len(found)] = found
        blocks = -(-max(pads, longest) // block)
        table = host.table.ravel()[: (n + 1) * blocks].reshape(n + 1, blocks)
        table[n] = self.pad
        return table

    def _places(self, size: Size) -> tuple[slice, slice]:
        """Where the items of decoding sequences and of prompts are."""
        first = self.prompt_sizes[-1].decoding  # the most of all
        first += first % 2  # ALIGNED: an item is two numbers of four bytes
        return slice(0, size.decoding), slice(first, first + self._most_items(size))

    def _most_items(self, size: Size) -> int:
        """Items of prompts at most, whose last programs may each have few rows; padding's too."""
        return size.tokens * self.repeat // self.most_rows + size.prompts + 1

    def _captured(self, size: Size, capture: Capture, cuts: int) -> _Graph:
        """``cuts``: blocks of rows with adapters; 0: the base alone."""
        runner, layout = self.runner, self.runner.layout
        numbers, work, count = self._with_prompts(size, cuts) if size.prompts else self._decoding(size, cuts)
        self._send(numbers, size, [[], [], []], [], [])
        rows = numbers.rows[:, : size.tokens]
        # A prompt of all tokens stands for all that there may be.
        new = [size.tokens] if size.prompts else [1] * count
        pages = Pages(numbers.table[:count], numbers.lengths[:count], numbers.starts[: count + 1], runner.block_size,
                      work, new)  # fmt: skip
        ends = [0, size.tokens] if size.prompts else range(count + 1)

        def run() -> Tensor:
            layout.slots = rows[2]
            layout.pieces = [Piece(a, b, [], False, b - a) for a, b in pairwise(ends)]
            layout.pages = pages
            runner.kinds = None
            if runner.slots is not None:
                runner.slots.rows.items = numbers.segments[:cuts] if cuts else None
            out = runner.forward(rows[0][None], rows[1])
            return self._kept(out) if size.prompts else out

        replay, out = capture(run)
        return _Graph(numbers, pages, replay, out)

    def _kept(self, out: Tensor) -> Tensor:
        """``out`` [T, H] in the memory that results of all steps with prompts share."""
        if self._out is None:  # before anything is captured, by the largest
            self._out = torch.empty_like(out)
        return self._out[: len(out)].copy_(out)

    def _decoding(self, size: Size, cuts: int) -> tuple[_Numbers, tuple[Work, ...], int]:
        """A decode step's numbers, of which the host never changes who has which rows."""
        spec = self.runner.model.spec
        (launch,) = launches([1] * size.tokens, self.repeat, spec.cached_dim, self.runner.kind)
        numbers = _Numbers(size, size.tokens, len(launch.items), cuts, self.runner.device)
        for host in numbers.hosts:
            host.starts[:], host.items[:] = np.arange(size.tokens + 1), launch.items
        return numbers, (Work(numbers.items, launch.rows, launch.used, launch.split),), size.tokens

    def _with_prompts(self, size: Size, cuts: int) -> tuple[_Numbers, tuple[Work, ...], int]:
        """The numbers of steps with prompts: sequences beside those that there is room for are padding and empty."""
        if (cuts > 0) not in self._shared:
            largest, most = self.prompt_sizes[-1], max(map(self._cuts, self.prompt_sizes)) if cuts else 0
            self._shared[cuts > 0] = _Numbers(largest, largest.decoding + largest.prompts + 2,
                                              self._places(largest)[1].stop, most, self.runner.device)  # fmt: skip
        numbers = self._shared[cuts > 0]
        decoding, prompts = (numbers.items[place] for place in self._places(size))
        used = self.few * self.repeat
        work = [Work(decoding, fewest_rows(used), used, True)] if size.decoding else []
        work.append(Work(prompts, self.most_rows, self.most_rows, False))
        return numbers, tuple(work), size.decoding + size.prompts + 2
