"""A key/value cache in 8 bits."""

from __future__ import annotations

from typing import ClassVar, Literal

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.techniques.base import Card, Phase, Technique


class KVQuant(Technique):
    """Keep keys and values in 8 bits: twice the tokens in the same memory, half the bytes per decode step."""

    card: ClassVar[Card] = Card(
        name="kv_quant",
        title="Quantised key/value cache",
        paper="arXiv:2303.06865",
        taxonomy="inference/memory/kv-cache",
        tasks=frozenset({"generate", "serve"}),
        lossless=False,
        claim="compresses weights and cache to 4 bits with negligible loss of accuracy (FlexGen)",
        tolerance=0.02,
        quality="perplexity within 2 % of the 16-bit cache",
        runs=False,
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 2
    """After flash_attention, whose operator reads the cache."""

    dtype: Literal["fp8", "int8"] = "fp8"
    """Storage dtype of keys and values."""

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """The cache and the attention's reads of it shrink."""
        ratio = DTYPE_BYTES[self.dtype] / DTYPE_BYTES[e.dtype]
        g.kv_cache *= ratio
        return g.each_block(lambda b: _narrow(b, ratio, self.dtype), layers_only=True)


def _narrow(b: Block, ratio: float, dtype: str) -> None:
    def narrow(o: Op) -> Op:
        if o.kind != "attention" or not o.shape:
            return o
        q_len, kv_len = o.shape[-3:-1]
        share = kv_len / (kv_len + q_len)  # of the traffic that is keys and values
        return changed(o, bytes=o.bytes * (1 - share * (1 - ratio)), kv_dtype=dtype)

    b.forward = [narrow(o) for o in b.forward]
