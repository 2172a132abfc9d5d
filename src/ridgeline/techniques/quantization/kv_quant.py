"""A key/value cache in 8 or 4 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from ridgeline.graph.graph import Block, Graph, Op, changed
from ridgeline.spec.device import DTYPE_BYTES
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.lowbit import kv_bytes
from ridgeline.spec.workload import Generate
from ridgeline.techniques.technique import Card, Phase, Technique

if TYPE_CHECKING:
    from ridgeline.runtime.build import Build
    from ridgeline.spec.scheduling import Scheduling


class KVQuant(Technique):
    """Keep keys and values in 8 or 4 bits: two to four times as many tokens in the same memory."""

    card: ClassVar[Card] = Card(
        name="kv_quant",
        title="Quantized key/value cache",
        paper="arXiv:2303.06865",
        taxonomy="inference/memory/kv-cache",
        tasks=frozenset({"generate", "serve"}),
        validated=frozenset({"serve"}),
        lossless=False,
        claim="compresses weights and cache to 4 bits with negligible loss of accuracy (FlexGen)",
        tolerance=0.02,
        quality="perplexity within 2 % of the 16-bit cache",
        example={"dtype": "int8"},
    )
    phase: ClassVar[Phase] = "compile"
    order: ClassVar[int] = 2
    """After flash_attention, whose operator reads the cache."""

    dtype: Literal["fp8", "int8", "int4"] = "fp8"
    """Storage format of keys and values: fp8 (e4m3, no scale), int8 (a scale per token and head), int4 (a minimum and a
    scale per 64 values of a token and head)."""

    @property
    def cache_dtype(self) -> str:
        """Storage dtype of keys and values."""
        return self.dtype

    def check(self, e: Experiment) -> None:
        """Two 4-bit codes share a byte."""
        d = e.model.cached_dim
        self.needs(
            self.dtype != "int4" or d % 2 == 0, f"heads of odd width {d} do not pack into bytes", "use dtype=int8"
        )

    def rewrite(self, g: Graph, e: Experiment) -> Graph:
        """Shrink the cache. A serving engine's attention reads it directly; here it is dequantized first."""
        each, wide = kv_bytes(self.dtype, e.model.cached_dim), DTYPE_BYTES[e.dtype]
        g.kv_cache *= each / wide
        if isinstance(e.workload, Generate) and not e.workload.engine:
            return g.each_block(lambda b: _expand(b, e, each, wide, self.dtype), layers_only=True)
        return g.each_block(lambda b: _narrow(b, each / wide, self.dtype), layers_only=True)

    def apply(self, run: Build) -> None:
        """Make generation use quantized caches."""
        from ridgeline.nn.quant.quantized_kv import CodedCache

        run.model.cache_of = lambda shape, dtype, device: CodedCache(self.dtype, shape, device)

    def scheduling(self, s: Scheduling) -> None:
        """Make the pool hold quantized blocks."""
        s.cache_kind = self.dtype


def _expand(b: Block, e: Experiment, each: float, wide: float, dtype: str) -> None:
    for at, o in enumerate(b.forward):
        if o.kind == "attention" or o.name.endswith(".scores"):
            kv_len = o.shape[-2]
            sequences = o.shape[0] if o.kind == "attention" else o.shape[0] // e.model.num_heads
            elements = float(e.model.cached_tensors * sequences * e.model.cached_heads * kv_len * e.model.cached_dim)
            b.forward.insert(
                at, Op(f"{o.name}.expand", o.module, "cast", "forward", 0, elements * (each + wide), dtype)
            )
            b.workspace += elements * wide
            return


def _narrow(b: Block, ratio: float, dtype: str) -> None:
    def narrow(o: Op) -> Op:
        if o.kind != "attention" or not o.shape:
            return o
        q_len, kv_len = o.shape[-3:-1]
        share = kv_len / (kv_len + q_len)  # fraction of the traffic that is keys and values
        return changed(o, bytes=o.bytes * (1 - share * (1 - ratio)), kv_dtype=dtype)

    b.forward = [narrow(o) for o in b.forward]
