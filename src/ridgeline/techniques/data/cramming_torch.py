"""A budget of time, energy or tokens: how much is spent, and the schedule that follows from it (arXiv:2212.14034)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.data.batches import Batch
from ridgeline.runtime.train_build import BatchSource

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_RAPL = Path("/sys/class/powercap")


def rapl_joules(folder: Path = _RAPL) -> Callable[[], float] | None:
    """Returns a function that reads the joules that the CPU packages have used since now; None where the kernel does
    not report them."""
    zones = [z for z in sorted(folder.glob("intel-rapl:*")) if z.name.count(":") == 1 and _counter(z) is not None]
    if not zones:
        return None
    before = [_counter(z) or 0.0 for z in zones]
    total = 0.0

    def read() -> float:
        nonlocal total
        for i, zone in enumerate(zones):
            now = _counter(zone)
            if now is None:
                continue
            if now < before[i]:  # the counter has wrapped around
                before[i] -= float((zone / "max_energy_range_uj").read_text())
            total += (now - before[i]) / 1e6
            before[i] = now
        return total

    return read


def _counter(zone: Path) -> float | None:
    try:
        return float((zone / "energy_uj").read_text())
    except (OSError, ValueError):
        return None


@dataclass
class Spending:
    """Tracks how much of a budget is spent, across interruptions; all ranks use rank 0's count."""

    budget: float
    """The budget in seconds, joules or tokens."""
    count: Callable[[], float] = time.monotonic
    """Counter that increases by what is spent."""
    agree: Callable[[float], float] = float
    """Broadcasts a number from rank 0 to every rank."""
    earlier: float = 0.0
    """Amount spent before this process started."""
    start: float | None = None
    known: tuple[int, float] = (-1, 0.0)
    """The last step that began, and the fraction that was spent when it did."""

    @property
    def spent(self) -> float:
        """The amount spent so far, by this rank's count."""
        if self.start is None:
            self.start = self.count()
        return self.earlier + self.count() - self.start

    def share(self, step: int) -> float:
        """Fraction of the budget that was spent when ``step`` began, in [0, 1]; the same on all ranks."""
        if step != self.known[0]:
            self.known = step, min(1.0, self.agree(self.spent / self.budget))
        return self.known[1]

    def finished(self) -> bool:
        """Whether the budget is used up."""
        return self.spent >= self.budget

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"spent": self.spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint; what was spent stays spent."""
        self.earlier, self.start, self.known = float(state["spent"]), None, (-1, 0.0)


def triangle(share: float, top: float) -> float:
    """One cycle of the learning rate: from 0 up to 1 at fraction ``top`` of the budget, and down to 0 at its end."""
    return share / top if share < top else max(0.0, (1 - share) / (1 - top))


@dataclass
class Ramp:
    """Rows of another source in batches that grow with the spent fraction of the budget."""

    inner: BatchSource
    whole: int
    """Rows in a batch of the source."""
    least: int
    """Every batch is a multiple of this many rows."""
    start: float
    """Fraction of the full batch to start with."""
    end: float
    """Fraction of the budget at which batches reach full size."""
    share: Callable[[int], float]
    step: int = 0
    cursor: int = 0
    """Rows consumed before ``step``."""
    used: int = 0
    """Rows in the batch of ``step``."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that produced the token ids."""
        return self.inner.tokenizer

    def rows(self, step: int) -> int:
        """Number of rows in the batch of ``step``."""
        at = min(1.0, self.share(step) / self.end) if self.end else 1.0
        wanted = self.whole * (self.start + (1 - self.start) * at)
        return min(self.whole, max(1, round(wanted / self.least)) * self.least)

    def batch(self, step: int) -> Batch:
        """The next rows, or the previous batch again if its step is requested again."""
        if step != self.step:
            self.step, self.cursor = step, self.cursor + self.used
        self.used = self.rows(step)
        first, last = self.cursor // self.whole, (self.cursor + self.used - 1) // self.whole
        parts = [self.inner.batch(i) for i in range(first, last + 1)]
        at = self.cursor - first * self.whole
        columns = [None if t[0] is None else torch.cat(t)[at : at + self.used] for t in zip(*parts, strict=True)]
        return Batch._make(columns)

    def held_out_batch(self) -> Batch | None:
        """The source's held-out batch."""
        return self.inner.held_out_batch()

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints, after the last step."""
        return {"step": self.step + 1, "cursor": self.cursor + self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint."""
        self.step, self.cursor, self.used = int(state["step"]), int(state["cursor"]), 0
