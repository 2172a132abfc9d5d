"""Device, Link and Cluster: peak rates, memories, links, prices and watts of the hardware a plan is predicted on.

Units are SI throughout: FLOP/s, bytes, bytes/s, seconds, watts, dollars per hour.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from ridgeline.spec.chip import Chip
from ridgeline.spec.efficiency import Efficiency, as_tuple

DType = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4"]

DTYPE_BYTES: dict[str, float] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "int64": 8, "bool": 1,
}  # fmt: skip
"""Bytes of one element."""


DECODE_ROWS = (1, 8, 32)
"""Rows (sequences that decode) of the steps that a probe times."""
PROMPT_ROWS = (64, 512)
"""Rows (tokens of one prompt) of the steps that a probe times."""
STEP_ROWS = (*DECODE_ROWS, *PROMPT_ROWS)


class Rate(BaseModel):
    """Cost of one kind of operator: ``seconds = latency + max(flops / flop_rate, bytes / byte_rate)``.

    Zero means "no such limit". ``source`` tells where the figures came from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    latency: float = 0.0
    """Seconds per call that no amount of arithmetic hides (launch, dispatch)."""
    flop_rate: float = 0.0
    """Achieved FLOP/s."""
    byte_rate: float = 0.0
    """Achieved bytes/s of memory traffic."""
    source: str = "measured"


Span = Annotated[tuple[PositiveInt, PositiveFloat], BeforeValidator(as_tuple)]


class Link(BaseModel):
    """One way to move bytes between devices or memories: a latency and a bandwidth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    bandwidth: float
    """Bytes per second, one direction, per device."""
    latency: float
    """Seconds per message."""
    p2p: bool = True
    """Whether a device reads and writes another's memory over it; false: bytes pass through host memory."""
    spans: Annotated[tuple[Span, ...], BeforeValidator(as_tuple)] = ()
    """Where host bridges or sockets lie between devices, by rising number: [neighbors, bandwidth of larger groups]."""
    server: str = ""
    """The one server that ``spans`` were measured in; empty: they hold for most."""
    source: str = ""

    @field_validator("spans")
    @classmethod
    def _rises(cls, spans: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        counts = [count for count, _ in spans]
        if counts != sorted(set(counts)):
            raise ValueError("the numbers of neighbors must rise")
        return spans

    @model_validator(mode="after")
    def _slower_across(self) -> Link:
        widths = [self.bandwidth, *(bandwidth for _, bandwidth in self.spans)]
        if widths != sorted(widths, reverse=True):
            raise ValueError(
                "a larger group in 'spans' cannot have more bandwidth than a smaller one, or than the link"
            )
        return self

    def across(self, devices: int) -> float:
        """``bandwidth`` of a group that spans this many neighbors."""
        beyond = [bandwidth for count, bandwidth in self.spans if count < devices]
        return beyond[-1] if beyond else self.bandwidth


class Host(BaseModel):
    """The server of the devices: the memory for offloaded tensors, and the cores that update them.

    ``memory_bytes`` may stand alone; times are then those of an ordinary server.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sockets: PositiveInt | None = None
    cores: PositiveInt | None = None
    """Of all sockets."""
    memory_bytes: PositiveFloat
    memory_bandwidth: PositiveFloat | None = None
    """Bytes/s of all channels of all sockets."""
    pcie_lanes: PositiveInt | None = None
    """Of all sockets, those that do not join them; None: enough for every device."""
    pcie_generation: Literal[3, 4, 5, 6] | None = None
    uplinks: PositiveInt | None = None
    """Links as wide as a device's from the sockets to the PCIe switches before the devices, or to these; None: four."""
    disks: PositiveInt | None = None
    """Drives over which what is offloaded may be spread; None: two."""
    disk_bandwidth: PositiveFloat | None = None
    """Bytes/s of one drive; None: 3 GB/s."""
    source: str = ""

    @model_validator(mode="after")
    def _lanes_have_a_rate(self) -> Host:
        if (self.pcie_lanes is None) != (self.pcie_generation is None):
            raise ValueError("'pcie_lanes' and 'pcie_generation' are given together")
        return self

    @property
    def pcie_bandwidth(self) -> float | None:
        """Bytes/s, one direction, of all lanes: 8 GT/s each in generation 3, twice as many in each later one; 128 of
        130 bits are data, in generation 6 about as many."""
        if self.pcie_lanes is None or self.pcie_generation is None:
            return None
        return self.pcie_lanes * 1e9 * 2.0 ** (self.pcie_generation - 3) * 128 / 130


class Device(BaseModel):
    """One accelerator (or CPU): dense peak rates per dtype, memory, on-chip caches, links, watts and price."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    title: str = ""
    kind: Literal["gpu", "cpu"] = "gpu"
    vendor: str = ""
    architecture: str = ""
    year: int = 0
    peak_flops: dict[str, float]
    """Dense (never sparse) FLOP/s per compute dtype; a dtype that is absent is not accelerated."""
    half_sums: float = 1.0
    """Rate of fp16 products that are summed in fp16, relative to sums in fp32: 2 on GeForce cards."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes/s of device memory."""
    l2_bytes: float = 0
    """Last-level cache; of a CPU that was measured, what its caches hold together; 0: not known."""
    sm_count: int = 0
    """Streaming multiprocessors, compute units, or cores."""
    clock: float = 0
    """Boost clock in Hz; 0: not known."""
    launch_latency: float = 4e-6
    """Seconds between dependent kernels when the host keeps ahead."""
    link: Link | None = None
    """To the other devices of one node (NVLink, Infinity Fabric, PCIe); None: host memory."""
    host_link: Link | None = None
    """To host memory (PCIe)."""
    network: Link | None = None
    """Between nodes, per device."""
    disk: Link | None = None
    """To the node's disk (NVMe), per device; None: an ordinary one."""
    host: Host | None = None
    """The server of one node; None: an ordinary one, with as much memory as it takes."""
    reserved_bytes: float = 0
    """Memory a framework context takes before the first tensor."""
    watts: float = 0
    price_per_hour: float = 0
    """Typical on-demand dollars per device-hour; 0: unknown."""
    rates: dict[str, Rate] = Field(default_factory=dict)
    """Measured operator costs, keyed ``kind.dtype`` or ``kind.direction.dtype`` (``predict/operators/kernel.py``);
    direction "inference": forward without autograd."""
    ranks: dict[str, dict[str, Rate]] = Field(default_factory=dict)
    """Like ``rates``, when this many processes share the device (a CPU measured with 2 ranks: key "2"); "serve": when
    one of its cores is left to a server's HTTP."""
    host_latency: dict[str, float] = Field(default_factory=dict)
    """Seconds that an operator costs in a real training step beyond what it costs timed alone (the autograd engine,
    Python, emptied caches), by number of processes ("1", "2"); the serving engine's own seconds: "serve.iteration" and
    "serve.reply" (of one: to run it, to send what it gave), "serve.sequence" and "serve.token" (the same of a sequence
    in it), "serve.request" (before and after the engine), "serve.admission" (of that, what its first iteration waits
    for), "serve.apart" (1: "reply" and "token" are those of a process beside the engine's). Measured on small reference
    models."""
    decode_latency: list[list[float]] = Field(default_factory=list)
    """What an operator costs in a decode step of the torch model beyond what it costs timed alone, [bytes of a layer's
    weights, seconds] by rising bytes: the more a layer reads, the less of what its operators need is still in caches
    when the next layer calls them."""
    step_latency: list[list[float]] = Field(default_factory=list)
    """What an operator costs in a step of the serving engine beyond what it costs timed alone, by rising size of the
    model: [bytes of weights, seconds with 1 row, …] for each of ``STEP_ROWS``, first those of decode steps, then those
    of prompts. Weights that caches hold are read faster than alone (negative seconds); where they outgrow them, every
    operator starts in cold ones."""
    kernel_latency: list[list[float]] = Field(default_factory=list)
    """The same where all layers of a decode step are one kernel, which saves what operators cost by themselves."""
    kernels: dict[str, dict[str, float]] = Field(default_factory=dict)
    """Seconds that `ridgeline probe` measured of the back ends of an operator (:mod:`ridgeline.spec.backends`), by
    operator and back end: the fastest computes it."""
    per_core: float = 1.0
    """Processes per core, of a CPU that more of them share than it has cores (:meth:`shared_by`)."""
    training_only: bool = False
    """Whether a probe measured what training needs and left out inference."""
    efficiency: Efficiency | None = None
    """Constants fitted on this very device (see ``predict/calibrate.py``); None: those of its architecture."""
    chip: Chip | None = None
    """The design that the figures follow from (``ridgeline.hardware``); None: they are a datasheet's."""
    source: str = ""
    """Where each figure comes from."""

    @property
    def sparse_cores(self) -> bool:
        """Whether it multiplies 2:4 weights at twice the dense rate (NVIDIA, from Ampere on: arXiv:2104.08378)."""
        return self.architecture.lower() in ("ampere", "ada", "hopper", "blackwell")

    @property
    def extra_latency(self) -> float:
        """Seconds to add to a measured operator's time inside a step, as this process sees it."""
        return self.host_latency.get("1", 0.0)

    def generating(self, layer: float) -> Device:
        """This device in generation, where no autograd engine runs beside the operators, with a model whose layers hold
        ``layer`` bytes each."""
        import numpy as np

        latency = {}
        if self.decode_latency:
            sizes, seconds = zip(*self.decode_latency, strict=True)
            latency["1"] = float(np.interp(layer, sizes, seconds))
        return self.model_copy(update={"rates": _of_inference(self.rates), "host_latency": latency})

    def serving(self, weights: float = 0.0, one_kernel: bool = False) -> Device:
        """This device in a step of the serving engine with a model of this many bytes: one line of ``step_latency``,
        or of ``kernel_latency`` where ``one_kernel`` computes all layers."""
        rates, line = _of_inference({**self.rates, **self.ranks.get("serve", {})}), []
        table = (one_kernel and self.kernel_latency) or self.step_latency
        if table:
            import numpy as np

            sizes, *columns = zip(*table, strict=True)
            line = [[weights, *(float(np.interp(weights, sizes, c)) for c in columns)]]
        return self.model_copy(update={"rates": rates, "host_latency": {}, "step_latency": line})

    def in_step(self, rows: float) -> float:
        """Seconds to add to each operator but attention in a step of this many rows; only of :meth:`serving`."""
        if not self.step_latency:
            return 0.0
        import numpy as np

        seconds = self.step_latency[0][1:]  # of older probes: of the first rows only
        return float(np.interp(rows, STEP_ROWS[: len(seconds)], seconds))

    def shared_by(self, ranks: int) -> Device:
        """This device as one of ``ranks`` processes sees it (a CPU's cores and bandwidth are divided among them)."""
        if self.kind != "cpu" or ranks == 1:
            return self
        measured = self.ranks.get(str(ranks), {})
        share = {k: v / ranks for k, v in self.peak_flops.items()}
        scaled = {
            k: r.model_copy(
                update={
                    "flop_rate": r.flop_rate / ranks,
                    "byte_rate": r.byte_rate / ranks,
                    "source": f"{r.source} / {ranks} ranks",
                }
            )
            for k, r in self.rates.items()
        }
        return self.model_copy(
            update={
                "peak_flops": share,
                "memory_bandwidth": self.memory_bandwidth / ranks,
                "memory_bytes": self.memory_bytes / ranks,
                "sm_count": max(1, self.sm_count // ranks),
                "per_core": max(1.0, ranks / self.sm_count) if self.sm_count else 1.0,
                "rates": {**scaled, **measured},
                "ranks": {},
                "host_latency": {**self.host_latency, "1": self.host_latency.get(str(ranks), self.extra_latency)},
            }
        )


def _of_inference(rates: dict[str, Rate]) -> dict[str, Rate]:
    """Rates of operators where autograd keeps nothing for a backward."""
    return rates | {k.replace(".inference.", ".forward."): r for k, r in rates.items() if ".inference." in k}


class Cluster(BaseModel):
    """``nodes`` × ``devices_per_node`` equal devices, written ``8xa800-80g`` or ``4x8xa100-80g-sxm``; or several such
    parts, ``2x8xa100-80g-sxm+1x8xrtx4090``, where every pipeline stage lies in one of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Device
    devices_per_node: int = Field(default=1, ge=1)
    nodes: int = Field(default=1, ge=1)
    parts: tuple[Cluster, ...] = ()
    """All parts in the order of their ranks, where devices differ; the fields above are then the first one's."""

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(part.size for part in self.parts) or self.nodes * self.devices_per_node

    def part(self, rank: int) -> Cluster:
        """The part that a rank's device is in; a cluster of equal devices is its only part."""
        for part in self.parts:
            if rank < part.size:
                return part
            rank -= part.size
        return self

    def places(self, stages: int) -> list[Cluster]:
        """The part that each of a pipeline's stages lies in."""
        return [self.part(stage * self.size // stages) for stage in range(stages)]

    @property
    def between(self) -> Cluster:
        """What messages between parts pass: two nodes of the part with the slowest network."""
        slowest = min(self.parts, key=lambda part: part.device.network.bandwidth if part.device.network else 0.0)
        return Cluster(device=slowest.device, nodes=2)

    @property
    def label(self) -> str:
        """The short form, as on the command line."""
        if self.parts:
            return "+".join(part.label for part in self.parts)
        if self.nodes > 1:
            return f"{self.nodes}x{self.devices_per_node}x{self.device.name}"
        return self.device.name if self.size == 1 else f"{self.size}x{self.device.name}"


def split_cluster_name(text: str) -> tuple[int, int, str]:
    """``"4x8xa100-80g-sxm"`` → (nodes 4, devices per node 8, "a100-80g-sxm"); counts default to 1."""
    match = re.fullmatch(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?(.+)", text.strip())
    assert match is not None  # the last group takes anything
    first, second, name = match.groups()
    if second:
        return int(first), int(second), name
    return 1, int(first or 1), name
