"""Text of several domains, sampled in proportions that follow their losses (arXiv:2310.06694, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ridgeline.data.batches import Batch
from ridgeline.spec.errors import UserError


def sources(data: str) -> list[str]:
    """The domains of a data source: its comma-separated parts, or the files and subdirectories of a directory."""
    if "," in data and not Path(data).expanduser().exists():
        return [part.strip() for part in data.split(",") if part.strip()]
    folder = Path(data).expanduser()
    if folder.is_dir():
        found = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
        return [str(p) for p in found if p.is_dir() or p.suffix.lower() in (".txt", ".md", ".rst", ".py", ".jsonl")]
    return [data]


def updated(
    weights: Sequence[float],
    losses: Sequence[float],
    reference: Sequence[float],
    clipped: bool = True,
    floor: float = 0.0,
) -> list[float]:
    """w ← w · exp(excess loss), normalized, with excess = max(loss - reference, 0), or unclipped; then mixed with a
    fraction ``floor`` of equal weights."""
    excess = [a - b for a, b in zip(losses, reference, strict=True)]
    if clipped:
        excess = [max(x, 0.0) for x in excess]
    most = max(excess)  # does not change the result, and avoids overflow in the exponential
    raw = [w * math.exp(x - most) for w, x in zip(weights, excess, strict=True)]
    return [(1 - floor) * x / sum(raw) + floor / len(raw) for x in raw]


@dataclass
class Domain:
    """One domain's tokens in windows, the last of which are held out."""

    name: str
    ids: np.ndarray
    windows: int
    held_out: int

    @property
    def trained(self) -> int:
        """Windows to train on."""
        return self.windows - self.held_out


@dataclass
class DomainBatches:
    """Draws each row of a batch from a random domain; within a domain, windows come in random order, each once per
    epoch."""

    tokenizer: Tokenizer
    domains: list[Domain]
    seq_len: int
    batch_size: int
    seed: int
    weights: list[float]
    cursors: list[int] = field(default_factory=list)
    """Windows consumed from each domain before ``step``."""
    step: int = 0
    reference: list[float] = field(default_factory=list)
    """Losses that the domains should reach."""
    _next: list[int] = field(default_factory=list)
    """Windows consumed after ``step``."""

    def __post_init__(self) -> None:
        self.cursors = self.cursors or [0] * len(self.domains)
        self._next = list(self.cursors)

    @classmethod
    def read(
        cls,
        tokens_of: Callable[[str, int], np.ndarray],
        tokenizer: Tokenizer,
        names: Sequence[str],
        seq_len: int,
        batch_size: int,
        seed: int,
        limit: int,
        weights: Sequence[float],
    ) -> DomainBatches:
        """Tokenize the domains. Raises :class:`UserError` for one that is too small."""
        domains = []
        for name in names:
            ids = tokens_of(name, limit)
            windows = (len(ids) - 1) // seq_len
            if windows < 2 * batch_size:
                raise UserError(
                    f"domain {name!r} has {max(0, windows)} sequences of {seq_len}, but a batch is held out of at least"
                    f" two of {batch_size}", "give more text, or a shorter seq_len or smaller batch",
                )  # fmt: skip
            domains.append(Domain(name, ids, windows, batch_size))
        sizes = [float(w) for w in weights] or [float(d.trained) for d in domains]
        return cls(tokenizer, domains, seq_len, batch_size, seed, [w / sum(sizes) for w in sizes])

    def drawn(self, step: int) -> np.ndarray:
        """The domain of each row of ``step``: the same on every rank."""
        return np.random.default_rng((self.seed, 1, step)).choice(len(self.domains), self.batch_size, p=self.weights)

    def batch(self, step: int) -> Batch:
        """The batch of ``step``, which must be the last one requested or a later one."""
        if step != self.step:
            if step < self.step:
                raise ValueError(f"step {step} was asked for after step {self.step}")
            self.step, self.cursors = step, list(self._next)
        taken = list(self.cursors)
        rows = []
        for i in self.drawn(step):
            d = self.domains[i]
            epoch, at = divmod(taken[i], d.trained)
            order = np.random.default_rng((self.seed, 2, i, epoch)).permutation(d.trained)
            rows.append(self._window(d, int(order[at])))
            taken[i] += 1
        self._next = taken
        return self._pack(rows)

    def held_out_of(self, domain: int) -> Batch:
        """A batch of one domain that no step trains on."""
        d = self.domains[domain]
        return self._pack([self._window(d, d.trained + i) for i in range(self.batch_size)])

    def held_out_batch(self) -> Batch | None:
        """A held-out batch that cycles through the domains."""
        rows = []
        for i in range(self.batch_size):
            d = self.domains[i % len(self.domains)]
            rows.append(self._window(d, d.trained + i // len(self.domains)))
        return self._pack(rows)

    def _window(self, d: Domain, at: int) -> np.ndarray:
        return d.ids[at * self.seq_len : (at + 1) * self.seq_len + 1]

    def _pack(self, rows: list[np.ndarray]) -> Batch:
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints, after the last step."""
        return {
            "step": self.step + 1, "cursors": list(self._next), "weights": list(self.weights),
            "reference": list(self.reference), "domains": [d.name for d in self.domains],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from a checkpoint. Raises :class:`UserError` if its domains differ."""
        mine = [d.name for d in self.domains]
        if state["domains"] != mine:
            raise UserError(f"the checkpoint has the domains {state['domains']}, the data now {mine}",
                            "use the same data, or start over")  # fmt: skip
        self.step, self.cursors = int(state["step"]), [int(n) for n in state["cursors"]]
        self._next = list(self.cursors)
        self.weights = [float(w) for w in state["weights"]]
        self.reference = [float(x) for x in state["reference"]]
