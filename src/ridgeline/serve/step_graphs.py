"""Decode steps as CUDA graphs: captured once for some numbers of sequences and lengths, then replayed by one launch.

A replay reads its numbers (tokens, positions, slots, block tables, lengths) from buffers that stay where they are; the
host fills a pinned copy of them and sends it in one piece. A step of fewer sequences than its graph's has rows of
padding, which write to a block that no sequence has; nothing reads what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.nn.memory.kv_pool import Piece
from ridgeline.nn.memory.step_pages import Pages, Work, launches
from ridgeline.spec.scheduling import CAPTURED_SEQUENCES

if TYPE_CHECKING:
    from ridgeline.serve.runner import PackedStep, Runner

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Runs a function and captures what it launches → (a call that launches the same again, the result that this fills)."""
BATCHES: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, CAPTURED_SEQUENCES)
"""Sequences of the captured steps, up to the most of a step."""
NARROWEST, WIDER = 64, 4
"""Blocks of a sequence in the narrowest captured table, and how much wider the next one is."""


class CudaCapture:
    """Captures on a GPU; all graphs share the memory of their temporaries, as only one runs at a time."""

    def __init__(self) -> None:
        self.pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Run twice beside the main stream, so that kernels are compiled and libraries have their memory; then
        capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = run()
        self.pool = self.pool or graph.pool()
        return graph.replay, out


@dataclass
class _Host:
    """The host's copy of what a replay reads."""

    whole: Tensor
    rows: np.ndarray
    """int64 [3, B]: tokens, positions, slots."""
    lengths: np.ndarray
    """int32 [B]."""
    table: np.ndarray
    """int32 [B, blocks]."""
    sent: Any = None
    """Recorded behind its last copy to the device."""

    @classmethod
    def make(cls, batch: int, blocks: int, device: torch.device) -> _Host:
        """Numbers of ``batch`` sequences with tables of ``blocks``."""
        whole = torch.from_numpy(np.zeros(4 * batch * (7 + blocks), dtype=np.uint8))
        whole = whole.pin_memory() if device.type == "cuda" else whole
        array, at = whole.numpy(), (24 * batch, 28 * batch)
        rows, lengths, table = array[: at[0]].view(np.int64), array[at[0] : at[1]], array[at[1] :]
        return cls(whole, rows.reshape(3, batch), lengths.view(np.int32), table.view(np.int32).reshape(batch, blocks))

    def free(self) -> None:
        """Wait until the last copy has read the numbers: they are about to change. It has, where the tokens of its step
        were waited for."""
        if self.sent is not None and not self.sent.query():
            self.sent.synchronize()


class _Numbers:
    """What a replay reads, on the device, where its address never changes; and two copies on the host, so that one can
    be filled while the other is on its way."""

    def __init__(self, batch: int, blocks: int, device: torch.device) -> None:
        self.hosts = [_Host.make(batch, blocks, device) for _ in range(2)]
        whole = self.device = torch.zeros(self.hosts[0].whole.numel(), dtype=torch.uint8, device=device)
        rows, lengths, table = whole.split([24 * batch, 4 * batch, 4 * batch * blocks])
        self.rows, self.lengths = rows.view(torch.int64).view(3, batch), lengths.view(torch.int32)
        self.table = table.view(torch.int32).view(batch, blocks)

    def next(self) -> _Host:
        """The copy to fill."""
        self.hosts.reverse()
        self.hosts[0].free()
        return self.hosts[0]

    def send(self, host: _Host) -> None:
        """Copy it to the device; the host does not wait."""
        self.device.copy_(host.whole, non_blocking=True)
        if self.device.is_cuda:
            host.sent = host.sent or torch.cuda.Event()
            host.sent.record()


@dataclass
class _Graph:
    """A captured step."""

    numbers: _Numbers
    pages: Pages
    """What a replay reads beside them: a graph does not keep the memory that it reads."""
    replay: Callable[[], object]
    out: Tensor
    """[B, H]: what the head reads."""


class StepGraphs:
    """The captured decode steps of a runner. ``pad``: the block of padding rows, ``most``: sequences of a step."""

    def __init__(self, runner: Runner, pad: int, most: int, longest: int, capture: Capture) -> None:
        """``longest``: tokens of a sequence."""
        self.runner, self.pad, self.capture = runner, pad, capture
        self.batches = [*(b for b in BATCHES if b < most), min(most, BATCHES[-1])]
        self.widths, need = [NARROWEST], -(-longest // runner.block_size)
        while self.widths[-1] < need:
            self.widths.append(self.widths[-1] * WIDER)
        self.widths[-1] = min(self.widths[-1], need)
        self.graphs: dict[tuple[int, int], _Graph] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture them all, the largest first: the memory of its temporaries is enough for the others."""
        for width in reversed(self.widths):
            for batch in reversed(self.batches):
                self.graphs[batch, width] = self._captured(batch, width)

    def find(self, step: PackedStep) -> tuple[int, int] | None:
        """The captured step that ``step`` can be a part of: one new token for each sequence, nothing beside."""
        n = len(step.pieces)
        if step.copies or step.kinds or len(step.ids) != n or not n or n > self.batches[-1]:
            return None
        if any(p.path for p in step.pieces):
            return None
        blocks = max(-(-p.length // self.runner.block_size) for p in step.pieces)
        return next(b for b in self.batches if b >= n), next(w for w in self.widths if w >= blocks)

    def run(self, step: PackedStep, key: tuple[int, int]) -> Tensor:
        """Do a step by its graph → [T, H], which the next step overwrites."""
        graph, n, size = self.graphs[key], len(step.pieces), self.runner.block_size
        host = graph.numbers.next()
        self._pad(host, n)
        host.rows[0, :n], host.rows[1, :n], host.rows[2, :n] = step.ids, step.at, step.slots
        for i, piece in enumerate(step.pieces):
            used = -(-piece.length // size)
            host.lengths[i] = piece.length
            host.table[i, :used] = np.frombuffer(piece.blocks, dtype=np.int32, count=used)
        graph.numbers.send(host)
        step.fill(graph.numbers.rows[0])
        graph.replay()
        return graph.out[:n]

    def _pad(self, host: _Host, n: int) -> None:
        """Rows from ``n`` on are padding: token 0 at place 0 of a sequence of one."""
        host.rows[:2, n:] = 0
        host.rows[2, n:] = self.pad * self.runner.block_size
        host.lengths[n:] = 1
        host.table[n:, 0] = self.pad

    def _captured(self, batch: int, width: int) -> _Graph:
        runner, layout = self.runner, self.runner.layout
        numbers = _Numbers(batch, width, runner.device)
        host = numbers.next()
        self._pad(host, 0)
        numbers.send(host)
        rows, lengths, table = numbers.rows, numbers.lengths, numbers.table
        spec = runner.model.spec
        (launch,) = launches([1] * batch, spec.num_heads // spec.num_kv_heads, spec.cached_dim, runner.kind)
        items = torch.tensor(launch.items, dtype=torch.int32).to(runner.device)
        starts = torch.arange(batch + 1, dtype=torch.int32).to(runner.device)
        work = Work(items, launch.rows, launch.used, launch.split)
        pages = Pages(table, lengths, starts, runner.block_size, (work,), [1] * batch)

        def run() -> Tensor:
            layout.slots = rows[2]
            layout.pieces = [Piece(i, i + 1, [], False, 1) for i in range(batch)]
            layout.pages = pages
            runner.kinds = None
            return runner.forward(rows[0][None], rows[1])

        replay, out = self.capture(run)
        return _Graph(numbers, pages, replay, out)
