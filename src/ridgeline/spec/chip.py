"""Chip: the design of an accelerator (cores, arrays, buffers, memory, links), and the silicon it is made of.

What a design gives (peaks, bandwidths) follows from it by arithmetic; what it takes (area, dollars, watts) follows with
a :class:`Process`, an :class:`Interface` for each kind of memory and link, and dated :class:`Prices`
(``ridgeline.hardware``). The template is that of LLMCompass (arXiv:2312.03134, section 3). Units are SI, but for areas
in square millimeters and dollars per gigabyte (1e9 bytes), as they are quoted.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

Dataflow = Literal["output", "weight", "input"]
"""What a systolic array keeps in place: results, weights or inputs."""


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Array(_Data):
    """The systolic array of one lane: rows × columns multiply-accumulate units."""

    rows: PositiveInt = 16
    columns: PositiveInt = 16
    macs_per_clock: PositiveFloat = 1
    """Of one unit."""
    dtype: Literal["fp16", "bf16", "fp32", "fp64"] = "fp16"
    """Of the multipliers, for the area; 16-bit ones compute both bf16 and fp16."""
    dataflow: Dataflow = "output"
    rates: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Rate of other dtypes relative to ``dtype`` (``int8 = 2``)."""


class Vector(_Data):
    """The vector unit of one lane, by its number of arithmetic units of each kind."""

    width: PositiveInt = 32
    """Elements per instruction: what the control logic grows with."""
    int32: int = Field(16, ge=0)
    fp16: int = Field(0, ge=0)
    fp32: int = Field(16, ge=0)
    fp64: int = Field(8, ge=0)


class Registers(_Data):
    """The register files of one lane; they count for the area only."""

    files: PositiveInt = 1
    depth: PositiveInt = 16384
    bits: PositiveInt = 32
    ports: PositiveInt = 4


class Core(_Data):
    """One core (streaming multiprocessor, compute unit): lanes that share a local buffer."""

    lanes: PositiveInt = 4
    sram_bytes: PositiveInt
    """Local buffer (shared memory and first-level cache)."""
    array: Array = Array()
    vector: Vector = Vector()
    registers: Registers = Registers()


class ChipMemory(_Data):
    """Off-chip memory: channels of one kind of interface."""

    kind: str
    """An interface of the catalog: hbm2e, pcie5 (memory behind it), ddr5."""
    channels: PositiveInt
    """Interfaces on the die."""
    active: PositiveInt | None = None
    """The number of these that are in use; None: all."""
    channel_bandwidth: PositiveFloat
    """Bytes/s of one channel."""
    bytes: PositiveFloat
    """Capacity of all channels."""

    @model_validator(mode="after")
    def _exists(self) -> ChipMemory:
        if self.active is not None and self.active > self.channels:
            raise ValueError(f"{self.active} active channels of {self.channels} on the die")
        return self

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the channels in use."""
        return (self.active or self.channels) * self.channel_bandwidth


class ChipLinks(_Data):
    """Links to the other chips of a node."""

    kind: str
    """An interface of the catalog: nvlink3, nvlink4, infinity-fabric."""
    count: PositiveInt
    bandwidth: PositiveFloat
    """Bytes/s of one link, one direction."""
    latency: NonNegativeFloat = 2e-6
    """Seconds per message."""


class Chip(_Data):
    """One accelerator as a design."""

    name: str
    title: str = ""
    process: str
    """A process of the catalog: n7, n6, n5."""
    architecture: str = "generic"
    """Whose efficiency constants hold: one of the catalog's, such as ampere or systolic."""
    clock: PositiveFloat
    """Hz."""
    cores: PositiveInt
    """Cores that work in a sold chip."""
    cores_on_die: PositiveInt | None = None
    """Cores that the die has; more than ``cores``: spares for defects. None: no spares."""
    core: Core
    cache_bytes: PositiveInt
    """Global buffer (last-level cache) that works in a sold chip."""
    cache_bytes_on_die: PositiveInt | None = None
    """What the die has of it; None: no more."""
    cache_bytes_per_clock: PositiveFloat
    """Bytes per clock that all cores together read from it."""
    memory: ChipMemory
    links: ChipLinks | None = None
    watts: NonNegativeFloat = 0
    """Rated power; 0: not given, the power model's."""
    other_mm2: NonNegativeFloat = 0
    """Area of what the template does not describe (video, host interface, test)."""
    source: str = ""

    @model_validator(mode="after")
    def _has_its_cores(self) -> Chip:
        if self.cores_on_die is not None and self.cores_on_die < self.cores:
            raise ValueError(f"{self.cores} working cores of {self.cores_on_die} on the die")
        if self.cache_bytes_on_die is not None and self.cache_bytes_on_die < self.cache_bytes:
            raise ValueError(f"{self.cache_bytes} working bytes of cache of {self.cache_bytes_on_die} on the die")
        return self

    @property
    def die_cores(self) -> int:
        """Cores on the die, spares included."""
        return self.cores_on_die or self.cores

    @property
    def die_cache(self) -> int:
        """Bytes of global buffer on the die."""
        return self.cache_bytes_on_die or self.cache_bytes

    @property
    def peak_flops(self) -> dict[str, float]:
        """Dense FLOP/s by dtype: cores · lanes · rows · columns · MACs · 2 · clock, and the vector units' fp32 and
        fp64."""
        a, v = self.core.array, self.core.vector
        lanes = self.cores * self.core.lanes * self.clock
        peak = 2.0 * lanes * a.rows * a.columns * a.macs_per_clock
        own: dict[str, float] = dict.fromkeys(("bf16", "fp16") if a.dtype in ("fp16", "bf16") else (a.dtype,), peak)
        vector = {"fp32": 2.0 * lanes * v.fp32, "fp64": 2.0 * lanes * v.fp64}
        narrow = {dtype: peak * rate for dtype, rate in a.rates.items()}
        found: dict[str, float] = {**vector, **own, **narrow}
        return {dtype: rate for dtype, rate in found.items() if rate}


class Process(_Data):
    """One manufacturing process."""

    name: str
    density: PositiveFloat
    """Logic transistors per square millimeter."""
    sram_bit_mm2: PositiveFloat
    """Area of one bit of static memory, without what surrounds the cells."""
    wafer_dollars: PositiveFloat
    """Price of a 300 mm wafer."""
    defects_per_mm2: PositiveFloat
    """D0 of the yield models."""
    clustering: PositiveFloat = 3.0
    """Alpha of the negative binomial yield model."""
    joules_per_flop: PositiveFloat
    """Of a 16-bit multiply-accumulate's two operations with all that feeds it (registers, instructions, wires)."""
    static_watts_per_mm2: NonNegativeFloat
    source: str = ""


class Interface(_Data):
    """One kind of memory or link interface, per channel, lane or link."""

    phy_mm2: PositiveFloat
    """Analog part; does not shrink with the process."""
    controller_transistors: PositiveFloat
    joules_per_bit: PositiveFloat
    """With the memory behind it, if any."""
    edge_mm: NonNegativeFloat = 0
    """Length of the die's edge that one takes; 0: not known."""
    dram: str = ""
    """Whose price per gigabyte holds; empty for links."""
    source: str = ""


class Prices(_Data):
    """Prices at one date."""

    date: str
    dollars_per_gb: dict[str, PositiveFloat]
    """Of memory by kind: hbm2e, ddr5."""
    wafer_dollars: dict[str, PositiveFloat] = Field(default_factory=dict)
    """By process, where they differ from the process's own."""
    source: str = ""
