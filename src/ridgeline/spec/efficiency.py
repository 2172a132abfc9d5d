"""Efficiency: the few physical constants that turn a datasheet into times, per architecture or per calibrated device.

Seconds are those at the clock named by :attr:`Efficiency.clock`; on a device with another boost clock they scale by
the ratio. Shares are of the datasheet's figures. The defaults of every class describe an ideal machine: nothing but
the roofline. Fitted values lie in ``catalog/efficiency/*.toml``.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator


def as_tuple(value: Any) -> Any:
    """Lists as tuples: TOML has arrays, no tuples."""
    return tuple(value) if isinstance(value, list) else value


Unrolling = Literal["tiling", "two_dimensional", "flexible"]
"""What the multipliers of an array compute at a time: many inputs of many outputs, many positions of one output, or
what suits the product best."""


class _Constants(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    earlier: ClassVar[frozenset[str]] = frozenset()
    """Constants in device files of earlier versions that no model reads any more."""

    @model_validator(mode="before")
    @classmethod
    def _without_earlier(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if k not in cls.earlier}


class GemmConstants(_Constants):
    """Matrix multiplication: tiles run in waves over the processors; see ``predict/operators/gemm.py``."""

    earlier: ClassVar[frozenset[str]] = frozenset((
        "vector_latency", "tensor_rate", "tile_128", "tile_64", "tile_square", "tile_small", "l2_bytes_per_clock",
        "store_bytes_per_clock", "feed", "fill", "split", "overlap",
    ))  # fmt: skip

    engine: Literal["tiles", "systolic", "unrolled"] = "tiles"
    """What multiplies: tiles in waves over processors, the systolic arrays of the device's design, or an array of
    multipliers with adder trees that unrolls loops (``predict/operators/unrolled.py``)."""
    unrolling: Unrolling = "tiling"
    """How the array of engine ``unrolled`` does so."""
    array: Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(as_tuple)] = (1, 1)
    """Its multipliers: those whose products are summed, and the number of such sums; a design has its own."""
    row_latency: float = 0.0
    """Seconds that every row of a product takes beside it, where rows pass one by one and each reads all weights (DFX):
    vector units, filling of pipelines, exchange with the other devices; 0: they pass together."""
    latency: float = 0.0
    """Seconds of launch, prologue and epilogue of one kernel."""
    share: float = 1.0
    """Achievable share of the tensor peak, at the clock that the power limit leaves."""
    power: float = 0.0
    """Watts per peak FLOP/s of the device that ``share`` was fitted on. A device that is allowed less power for its
    peak clocks lower, by the square root of the ratio (power falls with frequency and voltage); 0: no such limit."""
    share_limit: float = 1.0
    """Achievable share where power is no limit."""
    load_bytes_per_clock: float = 1e9
    """Bytes of operands per clock that reach one processor from the cache: what small tiles wait for, which load more
    per multiplication."""
    hidden_store: bool = False
    """Whether one tile is written while the next one is multiplied: tensor memory holds the sums of both."""
    port: float = 1.0
    """What one processor draws from the cache and stores, relative to the usual bytes per clock."""
    tile_rows: float = 1.0
    """Rows of the output tiles relative to those that libraries have: larger arrays need larger tiles."""
    tile_columns: float = 1.0
    """The same of columns."""
    memory_share: float = 1.0
    """Achievable share of the memory bandwidth."""
    wave: float = 0.0
    """How much of a part-filled last wave is lost: 1 all of it, 0 none (work is balanced over the processors)."""
    vector_rows: int = 1
    """Rows up to which the library multiplies on the vector units, not the tensor cores."""
    vector_clocks: float = 0.0
    """Clocks that one processor takes per result of such a kernel, beside reading the weights."""
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

    earlier: ClassVar[frozenset[str]] = frozenset(("tail", "split", "overlap", "memory_share"))

    latency: float = 0.0
    tensor_share: float = 1.0
    """Achievable share of the tensor peak in a tile's two products."""
    softmax_clocks: float = 0.0
    """Clocks per 128 × 128 tile that exponentials and sums take beside the products: tensor peaks have grown faster
    than the units that do them (arXiv:2407.08608)."""
    tensor_rate: float = 0.0
    """FLOP per clock and processor of the device that ``softmax_clocks`` was fitted on. Where products run faster,
    kernels have been rewritten to hide the rest behind them in proportion; 0: they have not."""
    asynchronous: bool = False
    """Whether, in forward, the products of one tile run beside the exponentials of another, so that the slower of the
    two takes all time; ``softmax_clocks`` is then all of theirs, not what products leave over."""
    narrow: Literal["", "queries", "cache"] = ""
    """Products run in 8 bits never, where queries and cache are 8 bits wide, or where the cache alone is."""
    block: float = 0.0
    """Seconds that each block of queries costs beyond its products."""
    query_passes: float = 1.0
    """Times that memory traffic equals the queries' bytes: read, write, and what the framework copies beside."""
    kv_passes: float = 1.0
    """The same for keys and values."""
    pack: bool = False
    """Whether a single query's heads that share one key head are computed as one block."""
    backward_share: float = 1.0
    """Rate of the backward kernel's products relative to the forward's."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_narrow(cls, values: Any) -> Any:
        """Earlier device files hold a flag."""
        if isinstance(values, dict) and isinstance(values.get("narrow"), bool):
            return {**values, "narrow": "cache" if values["narrow"] else ""}
        return values


class DecodeConstants(_Constants):
    """Attention of one query per sequence over a paged cache; see ``predict/operators/attention_time.py``."""

    earlier: ClassVar[frozenset[str]] = frozenset((
        "chunk", "pull", "wave", "reread", "math_share", "overlap", "split_unshared",
    ))  # fmt: skip

    latency: float = 0.0
    memory_share: float = 1.0
    """Achievable share of the memory bandwidth."""
    tile: float = 1.0
    """Keys read at least, per sequence and head."""
    rows: PositiveInt = 16
    """Rows of the tile that the queries of one key head fill, in part: the tensor cores multiply all of them."""
    narrow: bool = False
    """Whether products run in the cache's 8 bits, for the kernel takes no queries of another width."""
    slots: float = 1.0
    """Blocks that one processor runs at a time."""
    block: float = 0.0
    """Seconds that each block costs beyond reading its keys."""
    draw_bytes_per_clock: float = 1e9
    """Bytes per clock that one block can draw: what it has in flight over the latency of memory."""
    split: float = 0.0
    """Seconds that merging the splits costs."""
    pack: float = 0.0
    """Seconds that treating the query heads of one key head as rows of one block costs."""
    transpose: float = 0.0
    """Seconds of rearranging queries and results for it, where there are several sequences and key heads."""
    splits: Literal["always", "shared", "never"] = "always"
    """Which caches the kernel divides among blocks: all long ones, those that query heads share, or none."""


class CollectiveConstants(_Constants):
    """Collectives inside a node and across; see ``predict/operators/collective_time.py``."""

    earlier: ClassVar[frozenset[str]] = frozenset(("alltoall_peer", "alltoall_share"))

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
    l2_share: float = 1.0
    """Share of the last-level cache that such tensors can fill: where it is two halves, some lies in both."""
    comm_sm_share: float = 0.0
    """Share of the processors that a collective in flight takes from compute."""
    spread: dict[str, float] = Field(default_factory=dict)
    """Logarithm of predicted over measured, 1.96 times of which holds 95 % of cross-validated estimates, by kind (gemm,
    prefill, decode, collective, pointwise), on a device of ``fitted_on``."""
    class_spread: dict[str, float] = Field(default_factory=dict)
    """The same on a device known by its datasheet only: of devices predicted with the constants of another."""

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, values: Any) -> Any:
        """Constants of 8-bit kernels that a file does not give are those of the 16-bit ones."""
        if not isinstance(values, dict):
            return values
        out = dict(values)
        for kind in ("gemm", "prefill", "decode"):
            table = out.get(kind, {})
            for name, given in table.items():
                wide = table.get("bf16" if name == "fp8" else name.removesuffix(".fp8"))
                if wide is not given and isinstance(wide, dict) and isinstance(given, dict):
                    out[kind] = {**out[kind], name: {**wide, **given}}
        return out
