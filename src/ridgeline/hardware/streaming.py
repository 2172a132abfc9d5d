"""Latency of an appliance that streams every weight past its multipliers once per token, as DFX does.

DFX (Hong et al., MICRO 2022, arXiv:2209.10797): n FPGAs share each layer's heads and columns, prompts pass one token at
a time like outputs, and a ring gathers the parts four times per layer. A pass takes

    L · fixed + MACs / (MACs per second · share · n),

``fixed`` the part of a layer that more FPGAs do not divide (vector units, ring), ``share`` what of their rate the
multipliers reach. Both are fitted on one model and predict others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Streaming:
    """The constants of one appliance."""

    macs_per_s: float
    """Of one device: lanes · width · clock."""
    fixed: float
    """Seconds per layer."""
    share: float
    """Of ``macs_per_s`` reached."""

    def pass_seconds(self, m: ModelSpec, devices: int, context: float, head: float = 0.5) -> float:
        """Seconds of one token through a model with this many tokens before it; ``head``: share of passes that end in
        a token, and so in the vocabulary's product."""
        return m.num_layers * self.fixed + macs(m, context, head) / (self.macs_per_s * self.share * devices)

    def tokens_per_s(self, m: ModelSpec, devices: int, prompt: int, output: int) -> float:
        """Output tokens per second of one sequence, prompt included."""
        passes = prompt + output
        return output / (passes * self.pass_seconds(m, devices, passes / 2, output / passes))


def macs(m: ModelSpec, context: float, head: float) -> float:
    """Multiply-accumulates of one token: weights of layers and head, and attention over the context."""
    layers = 12 * m.num_layers * m.hidden_size**2
    return layers + head * m.vocab_size * m.hidden_size + 2 * context * m.hidden_size * m.num_layers


def fit(m: ModelSpec, macs_per_s: float, measured: Sequence[tuple[int, float]], context: float) -> Streaming:
    """The constants of least squared relative error: ``measured`` holds (devices, seconds per pass)."""
    work = macs(m, context, 0.5) / macs_per_s
    # (layers · fixed + work / n · slow) / t = 1: two normal equations in fixed and slow = 1 / share
    rows = [(m.num_layers / t, work / n / t) for n, t in measured]
    aa, ab, bb = (sum(x * y for x, y in pairs) for pairs in (
        [(a, a) for a, _ in rows], rows, [(b, b) for _, b in rows]))  # fmt: skip
    a, b = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = aa * bb - ab * ab
    fixed, slow = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    return Streaming(macs_per_s, fixed, 1.0 / slow)
