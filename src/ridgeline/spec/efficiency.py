"""Efficiency: the few physical constants that turn a datasheet into times, per architecture or per calibrated device.

Seconds are those at the clock named by :attr:`Efficiency.clock`; on a device with another boost clock they scale by
the ratio. Shares are of the datasheet's figures. The defaults of every class describe an ideal machine: nothing but
the roofline. Fitted values lie in ``catalog/efficiency/*.toml``.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_IDEAL = 16.0
"""Exponent that makes ``(a^p + b^p)^(1/p)`` very nearly max(a, b)."""


class _Constants(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GemmConstants(_Constants):
    """Matrix multiplication: tiles run in waves over the processors; see ``predict/operators/gemm.py``."""

    latency: float = 0.0
    """Seconds of launch, prologue and epilogue of one kernel."""
    vector_latency: float = 0.0
    """The same for one row (m = 1), which has simpler kernels."""
    share: float = 1.0
    """Achievable share of the tensor peak with the largest tile, at the clock that the power limit leaves."""
    power: float = 0.0
    """Watts per peak FLOP/s of the device that ``share`` was fitted on. A device that is allowed less power for its
    peak clocks lower, by the square root of the ratio (power falls with frequency and voltage); 0: no such limit."""
    share_limit: float = 1.0
    """Achievable share where power is no limit."""
    tensor_rate: float = 0.0
    """FLOP per clock and processor of the device that the tiles' rates were fitted on. What small tiles lose is time to
    load operands, which weighs less where products run slower; 0: not known."""
    tile_128: float = 1.0
    """Rate of a 128 × 128 tile relative to a 256 × 128 one, which loads fewer operands per multiplication."""
    tile_64: float = 1.0
    """Rate of a 128 × 64 tile relative to 128 × 128."""
    tile_square: float = 1.0
    """Rate of a 64 × 64 tile relative to 128 × 64."""
    tile_small: float = 1.0
    """Rate of tiles with a side of 16 or 32 relative to 64 × 64."""
    memory_share: float = 1.0
    """Achievable share of the memory bandwidth."""
    feed: float = 0.0
    """Share of the processors that must be busy to reach it."""
    wave: float = 0.0
    """How much of a part-filled last wave is lost: 1 all of it, 0 none (work is balanced over the processors)."""
    fill: float = 0.0
    """Seconds to fill a tile's pipeline."""
    split: float = 0.0
    """Seconds that summing the parts of a split k costs."""
    l2_bytes_per_clock: float = 64.0
    """Bytes per clock and processor between cache and processor, which partial sums cross."""
    store_bytes_per_clock: float = 1e9
    """Bytes per clock at which one processor writes a finished tile."""
    overlap: float = _IDEAL
    """Exponent p of ``(compute^p + memory^p)^(1/p)``: large when they overlap fully."""
    quantize_latency: float = 0.0
    """Seconds of the kernels that find the scale of an activation tensor and convert it."""
    quantize_share: float = 1.0
    """Share of the memory bandwidth that they reach."""
    dequantize_share: float = 1.0
    """Rate left when weights are expanded on the fly (weight-only quantization)."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_spelling(cls, values: Any) -> Any:
        """Earlier device files say ``quantise``."""
        return {k.replace("quantise", "quantize"): v for k, v in values.items()} if isinstance(values, dict) else values


class PrefillConstants(_Constants):
    """Fused attention over many queries; see ``predict/operators/attention_time.py``."""

    latency: float = 0.0
    tensor_share: float = 1.0
    """Achievable share of the tensor peak in a tile's two products."""
    softmax_clocks: float = 0.0
    """Clocks per 128 × 128 tile that exponentials and sums take beside the products: tensor peaks have grown faster
    than the units that do them (arXiv:2407.08608)."""
    tensor_rate: float = 0.0
    """FLOP per clock and processor of the device that ``softmax_clocks`` was fitted on. Where products run faster,
    kernels have been rewritten to hide the rest behind them in proportion; 0: they have not."""
    narrow: bool = False
    """Whether the products run in 8 bits where the cache does."""
    block: float = 0.0
    """Seconds that each block of queries costs beyond its products."""
    tail: float = 0.0
    """Share of the longest block's time during which the other processors have run dry."""
    query_passes: float = 1.0
    """Times that memory traffic equals the queries' bytes: read, write, and what the framework copies beside."""
    kv_passes: float = 1.0
    """The same for keys and values."""
    memory_share: float = 1.0
    split: float = 1e-3
    """Seconds that merging costs where the keys of one block are divided among processors."""
    overlap: float = _IDEAL
    pack: bool = False
    """Whether a single query's heads that share one key head are computed as one block."""
    backward_share: float = 1.0
    """Rate of the backward kernel's products relative to the forward's."""


class DecodeConstants(_Constants):
    """Attention of one query per sequence over a paged cache; see ``predict/operators/attention_time.py``."""

    latency: float = 0.0
    memory_share: float = 1.0
    """Achievable share of the memory bandwidth."""
    tile: float = 1.0
    """Keys read at least, per sequence and head."""
    slots: float = 1.0
    """Blocks that one processor runs at a time."""
    chunk: float = 64.0
    """Fewest keys that are worth a split of their own."""
    block: float = 0.0
    """Seconds that each block costs beyond reading its keys."""
    pull: float = 1e6
    """Bandwidth one block can draw, in units of an even share of memory bandwidth per processor."""
    math_share: float = 1.0
    """Achieved share of the tensor peak: a vector times a matrix uses little of it."""
    wave: float = 0.0
    """How much of a part-filled last wave is lost."""
    split: float = 0.0
    """Seconds that merging the splits costs."""
    overlap: float = _IDEAL
    pack: float = 0.0
    """Seconds that treating the query heads of one key head as rows of one block costs."""
    transpose: float = 0.0
    """Seconds of rearranging queries and results for it, where there are several sequences and key heads."""
    split_unshared: bool = True
    """Whether keys are split, too, when no query heads share them."""
    reread: float = 1.0
    """Cost of reading shared keys again for every query head, as a share of reading them from memory."""


class CollectiveConstants(_Constants):
    """Collectives inside a node and across; see ``predict/operators/collective_time.py``."""

    latency: float = 0.0
    """Seconds of launch and synchronization."""
    bandwidth_share: float = 1.0
    """Share of the link's bandwidth that a large ring reaches."""
    local: float = 0.0
    """Cost of copying a rank's own part, as a share of sending it."""
    ll_hop: float = 0.0
    """Seconds per hop of the protocol whose every 8 bytes carry a flag (LL)."""
    ll_bandwidth: float = 1e15
    """Bytes/s that its flags and small buffers allow on any link (at the clock of the seconds); at best half the plain
    protocol's, for half of what it sends is flags."""
    ll128_hop: float = 0.0
    """Seconds per hop of the protocol with a flag per 128 bytes (LL128)."""
    ll128_share: float = 1.0
    """Its bandwidth relative to the plain protocol's."""
    ll128_latency: float = 0.0
    simple_hop: float = 0.0
    """Seconds per hop of the plain protocol (Simple)."""
    simple_latency: float = 0.0
    tree_hop: float = 0.0
    """Seconds per level of a tree all-reduce."""
    alltoall_latency: float = 0.0
    alltoall_peer: float = 0.0
    """Seconds per peer of an all-to-all."""
    alltoall_share: float = 1.0
    """Bandwidth of an all-to-all relative to a ring's."""
    alltoall_ramp: float = 0.0
    """Seconds lost to starting large transfers …"""
    alltoall_half: float = 1.0
    """… half of them at this many bytes."""
    nvls_share: float = 0.0
    """Share of the link's bandwidth of an all-reduce summed in the switch (NVLink SHARP); 0: the switch cannot."""
    nvls_latency: float = 0.0
    network_share: float = 1.0
    """Share of the network's bandwidth that large collectives reach."""
    network_hop: float = 0.0
    """Seconds per hop across nodes beyond the link's own latency."""


class Efficiency(_Constants):
    """All constants of one architecture or one calibrated device."""

    clock: float = 0.0
    """Boost clock in Hz at which the seconds below hold; 0: they do not scale."""
    fitted_on: list[str] = Field(default_factory=list)
    """Devices whose measurements the constants were fitted on."""
    source: str = "class default"
    """Where predictions made with them come from, for the devices of ``fitted_on``; others are class defaults."""
    data: str = ""
    """The data set and what is assumed rather than fitted."""
    gemm: dict[str, GemmConstants] = Field(default_factory=lambda: {"bf16": GemmConstants()})
    """By operand dtype: bf16 (all 16-bit), fp8 (all 8-bit and narrower), fp32."""
    prefill: dict[str, PrefillConstants] = Field(default_factory=lambda: {"flash": PrefillConstants()})
    """By kernel library, then by cache dtype where it matters: flash, flash.fp8, trtllm, trtllm.fp8."""
    decode: dict[str, DecodeConstants] = Field(default_factory=lambda: {"flash": DecodeConstants()})
    """By kernel: flash; xqa and mmha (TensorRT-LLM's for shared and for unshared key heads); each with .fp8."""
    collective: CollectiveConstants = CollectiveConstants()
    pointwise_latency: float = 0.0
    """Seconds of launch of a kernel that only moves bytes."""
    pointwise_share: float = 1.0
    """Its achievable share of the memory bandwidth."""
    l2_gain: float = 1.0
    """Bandwidth of the last-level cache relative to memory, for tensors that stay in it from one kernel to the next."""
    comm_sm_share: float = 0.0
    """Share of the processors that a collective in flight takes from compute."""
    spread: dict[str, float] = Field(default_factory=dict)
    """Relative error that 68 % of cross-validated estimates stay within, by kind (gemm, prefill, decode, collective,
    pointwise), on a device of ``fitted_on``."""
    class_spread: dict[str, float] = Field(default_factory=dict)
    """The same on a device known by its datasheet only."""
